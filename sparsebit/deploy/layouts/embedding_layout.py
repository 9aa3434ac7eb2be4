"""Embeddings that are looked up as integers.

`Gather(DequantizeLinear(table), ids)` dequantizes the whole table at every run: 12 million numbers of a BERT for 64
tokens. Looking up the integers first, and their scales, costs as much as in float. There is no DequantizeLinear with
a scale per row after the Gather, so its two steps are written out: Cast and Mul.
"""

from __future__ import annotations

from sparsebit.deploy.exporting.qdq import ROLE_KEY
from sparsebit.deploy.onnx_graph.ir_values import producer, put_instead, remove_unread, stored, stored_once
from sparsebit.deploy.onnx_graph.number_types import FLOAT8
from sparsebit.deploy.onnx_graph.packages import ir, numpy
from sparsebit.deploy.onnx_graph.qdq_graph import DEQUANTIZE


def lay_out_embeddings(model: ir.Model) -> None:
    """Gather(DequantizeLinear(codes), ids) -> (Gather(codes, ids) - zero point) * Gather(scale, ids), in place."""
    for node in list(model.graph):
        dequantize = producer(node.inputs[0], DEQUANTIZE) if node.op_type == "Gather" else None
        if dequantize is not None and _fits(node, dequantize):
            _rewrite(model, node, dequantize)
            remove_unread(model, dequantize)


def _fits(gather: ir.Node, dequantize: ir.Node) -> bool:
    """A stored matrix whose rows are looked up, with one scale for all or one per row.

    ONNX Runtime gathers neither 8-bit floats nor integers of fewer than 8 bits.
    """
    codes = dequantize.inputs[0].const_value if dequantize.inputs[0] is not None else None
    if codes is None or len(codes.shape) != 2 or dequantize.metadata_props.get(ROLE_KEY) != "weight":
        return False
    axes = [node.attributes["axis"].as_int() for node in (gather, dequantize) if "axis" in node.attributes]
    is_readable = codes.dtype.name != FLOAT8.name and codes.dtype.bitwidth >= 8
    return is_readable and "block_size" not in dequantize.attributes and not any(axes)


def _rewrite(model: ir.Model, gather: ir.Node, dequantize: ir.Node) -> None:
    codes, scale, *rest = dequantize.inputs
    ids, output, name = gather.inputs[1], gather.outputs[0], dequantize.name
    assert codes is not None and scale is not None and ids is not None
    per_row = "axis" in dequantize.attributes
    new: list[ir.Node] = []

    def add(op_type: str, inputs: list[ir.Value], attributes: dict[str, int] | None, suffix: str) -> ir.Value:
        note = dict(dequantize.metadata_props)
        made = ir.node(op_type, inputs, attributes, name=f"{name}/{suffix}", metadata_props=note)
        made.outputs[0].name = f"{output.name}/{suffix}"
        new.append(made)
        return made.outputs[0]

    def row_wise(parameter: ir.Value, suffix: str) -> ir.Value:
        """The parameter of each id, with a dimension for the row's numbers."""
        if not per_row:
            return parameter
        found = add("Gather", [parameter, ids], {"axis": 0}, suffix)
        last = stored_once(model, "sparsebit/last_axis", numpy.array([-1], numpy.int64))
        return add("Unsqueeze", [found, last], None, f"{suffix}_column")

    numbers = add("Cast", [add("Gather", [codes, ids], {"axis": 0}, "codes")], {"to": int(ir.DataType.FLOAT)}, "float")
    zero_point = rest[0] if rest else None
    if zero_point is not None and zero_point.const_value is not None and stored(zero_point).any():
        shift = add("Cast", [row_wise(zero_point, "zero_point")], {"to": int(ir.DataType.FLOAT)}, "shift")
        numbers = add("Sub", [numbers, shift], None, "shifted")
    add("Mul", [numbers, row_wise(scale, "scale")], None, "value")
    put_instead(model, gather, new)
