"""Embeddings that are looked up as integers.

`Gather(DequantizeLinear(table), ids)` dequantizes the whole table at every run: 12 million numbers of a BERT for 64
tokens. Looking up the integers first, and their scales, costs as much as in float. There is no DequantizeLinear with
a scale per row after the Gather, so its two steps are written out: Cast and Mul.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsebit.deploy.exporting.qdq import ROLE_KEY
from sparsebit.deploy.onnx_graph.initializers import stored_once
from sparsebit.deploy.onnx_graph.number_types import FLOAT8

if TYPE_CHECKING:
    import onnx_ir as ir


def lay_out_embeddings(model: ir.Model) -> None:
    """Gather(DequantizeLinear(codes), ids) -> (Gather(codes, ids) - zero point) * Gather(scale, ids), in place."""
    for node in list(model.graph):
        table = node.inputs[0] if node.op_type == "Gather" else None
        dequantize = table.producer() if table is not None else None
        if dequantize is None or not _fits(node, dequantize):
            continue
        _rewrite(model, node, dequantize)
        if not dequantize.outputs[0].uses():
            model.graph.remove(dequantize, safe=True)


def _fits(gather: ir.Node, dequantize: ir.Node) -> bool:
    """A stored matrix whose rows are looked up, with one scale for all or one per row.

    ONNX Runtime gathers neither 8-bit floats nor integers of fewer than 8 bits.
    """
    if dequantize.op_type != "DequantizeLinear" or dequantize.metadata_props.get(ROLE_KEY) != "weight":
        return False
    codes, axis = dequantize.inputs[0], gather.attributes.get("axis")
    if codes is None or codes.const_value is None or len(codes.const_value.shape) != 2:
        return False
    if codes.const_value.dtype.name == FLOAT8.name or codes.const_value.dtype.bitwidth < 8:
        return False
    axes = (axis, dequantize.attributes.get("axis"))
    return "block_size" not in dequantize.attributes and all(one is None or one.as_int() == 0 for one in axes)


def _rewrite(model: ir.Model, gather: ir.Node, dequantize: ir.Node) -> None:
    import numpy
    import onnx_ir as ir

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
    if zero_point is not None and zero_point.const_value is not None and zero_point.const_value.numpy().any():
        shift = add("Cast", [row_wise(zero_point, "zero_point")], {"to": int(ir.DataType.FLOAT)}, "shift")
        numbers = add("Sub", [numbers, shift], None, "shifted")
    value = add("Mul", [numbers, row_wise(scale, "scale")], None, "value")
    value.shape, value.type = output.shape, output.type
    model.graph.insert_before(gather, new)
    value.name = output.name
    ir.convenience.replace_all_uses_with(output, value, replace_graph_outputs=True)
    model.graph.remove(gather, safe=True)
