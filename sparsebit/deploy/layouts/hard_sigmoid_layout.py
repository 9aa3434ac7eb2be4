"""Rewrites hard sigmoids between quantized tensors into a form for which ONNX Runtime has an integer kernel.

`hardsigmoid(x) = clip((x + 3) / 6, 0, 1)`. ONNX Runtime computes it in float, with a conversion on either side, and a
hard swish with it: 2.5 ns per element against 1.0 ns in integers (x86, one thread). It has an integer kernel for the
sum `x + 3`. Quantized with six times the gate's scale, that sum has the codes of the gate, and saturation clips at both
ends.
"""

from __future__ import annotations

from typing import Any

from sparsebit.deploy.exporting.qdq import ROLE_KEY
from sparsebit.deploy.onnx_graph.ir_values import become, is_single, producer, put_instead, stored, stored_once
from sparsebit.deploy.onnx_graph.packages import ir, numpy, onnx
from sparsebit.deploy.onnx_graph.qdq_graph import DEQUANTIZE, QUANTIZE
from sparsebit.numerics.integer_kernels import saturates_as_hard_sigmoid

_SLOPE, _MIDDLE, _SHIFT, _FACTOR = 1 / 6, 0.5, 3.0, 6
_KEY = "sparsebit.computes"  # the op that a node of the file computes, if it is another one


def lay_out_hard_sigmoids(model: ir.Model) -> None:
    """HardSigmoid + QuantizeLinear -> Add + QuantizeLinear with six times the scale, in place.

    The DequantizeLinear after it keeps the gate's scale. If saturation would not clip at 0 and 1, nothing changes.
    """
    # 1 with the scale 3 and the zero point 0: the constant 3, quantized
    numbers = {"one": numpy.uint8(1), "three": numpy.float32(_SHIFT), "zero": numpy.uint8(0)}
    arrays = {f"hard_sigmoid/{name}": numpy.asarray(number) for name, number in numbers.items()}
    for node in list(model.graph):
        quantize = _quantize_behind(node)
        source = producer(node.inputs[0], DEQUANTIZE) if quantize is not None else None
        if quantize is None or source is None or not is_single(source.inputs[1]):
            continue
        constants = [stored_once(model, name, array) for name, array in arrays.items()]
        dequantized = ir.node(DEQUANTIZE, constants, name=f"{node.name}/three")
        three = become(dequantized.outputs[0], node.outputs[0], f"{node.name}/three")
        three.type, three.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([])
        props = {**node.metadata_props, _KEY: node.op_type}
        added = ir.node("Add", [node.inputs[0], three], name=node.name, metadata_props=props)
        put_instead(model, node, [dequantized, added])
        scale = quantize.inputs[1]
        assert scale is not None
        coarser = stored_once(model, f"{scale.name}/x{_FACTOR}", stored(scale) * numpy.float32(_FACTOR))
        quantize.replace_input_with(1, coarser)


def is_hard_sigmoid(node: Any) -> bool:
    """Whether a node of a file (a NodeProto) is an Add that computes a hard sigmoid."""
    return node.op_type == "Add" and any(p.key == _KEY and p.value == "HardSigmoid" for p in node.metadata_props)


def hard_sigmoid_attributes() -> list[Any]:
    """The attributes of the HardSigmoid that such an Add computes."""
    return [onnx.helper.make_attribute("alpha", _SLOPE), onnx.helper.make_attribute("beta", _MIDDLE)]


def _quantize_behind(node: ir.Node) -> ir.Node | None:
    """The QuantizeLinear that is the only reader of a hard sigmoid, if its codes saturate exactly at 0 and 1."""
    if node.op_type != "HardSigmoid" or node.outputs[0].is_graph_output() or not _is_torchs(node):
        return None
    readers = [reader for reader, _ in node.outputs[0].uses()]
    quantize = readers[0] if len(readers) == 1 else None
    if quantize is None or quantize.op_type != QUANTIZE or len(quantize.inputs) < 3:
        return None
    # The simulation computes any other role in float.
    if quantize.metadata_props.get(ROLE_KEY) != "gate" or not all(map(is_single, quantize.inputs[1:3])):
        return None
    scale, zero_point = (stored(value).reshape(()) for value in quantize.inputs[1:3])
    saturates = saturates_as_hard_sigmoid(float(scale), float(zero_point), 0, 255)
    return quantize if str(zero_point.dtype) == "uint8" and saturates else None


def _is_torchs(node: ir.Node) -> bool:
    slope, middle = node.attributes.get("alpha"), node.attributes.get("beta")
    is_middle = middle is None or middle.as_float() == _MIDDLE  # also ONNX's default
    return slope is not None and abs(slope.as_float() - _SLOPE) < 1e-6 and is_middle
