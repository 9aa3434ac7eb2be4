"""Rewrites what OpenVINO (2026.4) computes otherwise than ONNX defines it.

- It moves the stride of a 1x1 convolution before the op in front, without the convolution's padding: the output has
  another shape. A kernel of size 2 with zeros at its end is the same function, and keeps its stride.
- It pools the codes of a quantized tensor, and pads them with the code 0, which is another number unless it is the zero
  point. A depthwise convolution with equal weights is the same average, and runs in float.
- It fuses a quantizer into the ReduceMax or ReduceMin before it, and then rounds the float numbers to whole ones first.
  A value that is read twice is not fused.
- It fuses a Clip and a quantizer into the norm before them, and then computes something else; the same remedy.
- With one thread, fewer than 16 rows and no bias (or the same for every output), it loses the scales of a quantized
  linear layer that a quantizer follows: outputs of 1e10 instead of 1; the same remedy.
"""

from __future__ import annotations

import math
from typing import Any

from sparsebit.deploy.onnx_graph.ir_values import become, producer, put_instead, stored, stored_once
from sparsebit.deploy.onnx_graph.packages import ir, numpy
from sparsebit.deploy.onnx_graph.qdq_graph import DEQUANTIZE, MOVES, QUANTIZE
from sparsebit.errors import DeploymentError

_NORMS = ("LayerNormalization", "InstanceNormalization", "GroupNormalization")


def lay_out_for_openvino(model: ir.Model) -> None:
    """All rewrites, in place."""
    for node in list(model.graph):
        if node.op_type == "Conv" and any(_ints(node, "pads")) and max(_ints(node, "strides"), default=1) > 1:
            _widen(model, node)
        is_counted = node.op_type == "AveragePool" and any(_ints(node, "count_include_pad"))
        if is_counted and any(_ints(node, "pads")) and _has_zero_point(node.inputs[0]):
            _convolve(model, node)
        if node.op_type in ("ReduceMax", "ReduceMin", "GlobalMaxPool") and node.outputs[0].uses():
            _read_twice(model, node)
        if node.op_type == "Clip" and (norm := _norm_before(node)) is not None:
            _read_twice(model, norm)
        if node.op_type in ("MatMul", "Gemm") and _has_even_bias(node) and _is_rounded(node.outputs[0]):
            _read_twice(model, node)


def _widen(model: ir.Model, conv: ir.Node) -> None:
    """1x1 -> 2x2 (1 -> 2 in one dimension), with zeros at the end and one more row of padding."""
    weight = conv.inputs[1]
    dequantize = producer(weight, DEQUANTIZE)
    source = weight if dequantize is None else dequantize.inputs[0]
    codes = stored(source)
    if codes is None or source is None or weight is None or math.prod(codes.shape[2:]) != 1:
        return
    if dequantize is not None and "block_size" in dequantize.attributes:
        raise DeploymentError(
            f"{conv.name}: OpenVINO computes a 1x1 convolution with a stride and padding wrongly, and its weight, in "
            "groups, cannot be rewritten; set a per-channel W.QSCHEME for it"
        )
    dims = codes.ndim - 2
    zero = stored(dequantize.inputs[2]) if dequantize is not None and len(dequantize.inputs) > 2 else None
    fill = numpy.zeros(1, codes.dtype) if zero is None else numpy.asarray(zero, codes.dtype)
    wide = numpy.broadcast_to(fill.reshape(-1, 1, *[1] * dims), (*codes.shape[:2], *[2] * dims)).copy()
    first: Any = (..., *[slice(0, 1)] * dims)
    wide[first] = codes
    assert source.const_value is not None
    value = stored_once(model, f"{source.name}/wide", wide, source.const_value.dtype)
    if dequantize is None:
        conv.replace_input_with(1, value)
    else:
        inputs = [value, *dequantize.inputs[1:]]
        own = ir.node(DEQUANTIZE, inputs, dequantize.attributes, name=f"{dequantize.name}/wide")
        own.metadata_props.update(dequantize.metadata_props)
        become(own.outputs[0], weight, f"{weight.name}/wide").shape = ir.Shape(wide.shape)
        model.graph.insert_before(conv, own)
        conv.replace_input_with(1, own.outputs[0])
    pads = _ints(conv, "pads")
    conv.attributes["pads"] = ir.AttrInt64s("pads", [*pads[:dims], *(pad + 1 for pad in pads[dims:])])
    conv.attributes["kernel_shape"] = ir.AttrInt64s("kernel_shape", [2] * dims)
    conv.attributes["dilations"] = ir.AttrInt64s("dilations", [1] * dims)


def _convolve(model: ir.Model, pool: ir.Node) -> None:
    """AveragePool -> a depthwise Conv in float, each of whose weights is 1 / (the size of the window)."""
    x, kernel = pool.inputs[0], _ints(pool, "kernel_shape")
    channels = x.shape[1] if x is not None and x.shape is not None else None
    if any(_ints(pool, "ceil_mode")) or not isinstance(channels, int):
        raise DeploymentError(
            f"{pool.name}: OpenVINO pads the average of quantized numbers with a number that is not 0, and with "
            "ceil_mode it cannot be rewritten; set ceil_mode=False or count_include_pad=False"
        )
    weight = numpy.full((channels, 1, *kernel), 1 / math.prod(kernel), numpy.float32)
    names = ("kernel_shape", "strides", "pads", "dilations")
    kept = [pool.attributes[name] for name in names if name in pool.attributes]
    inputs = [x, stored_once(model, f"{pool.name}/weight", weight)]
    attributes = [*kept, ir.AttrInt64("group", channels)]
    put_instead(
        model, pool, [ir.Node("", "Conv", inputs, attributes, name=pool.name, metadata_props=dict(pool.metadata_props))]
    )


def _read_twice(model: ir.Model, node: ir.Node) -> None:
    value = node.outputs[0]
    kept = ir.Node("", node.op_type, node.inputs, list(node.attributes.values()), name=node.name)
    kept.metadata_props.update(node.metadata_props)
    become(kept.outputs[0], value, f"{value.name}/alone")
    put_instead(model, node, [kept, ir.node("Max", [kept.outputs[0]] * 2, name=f"{node.name}/twice")])


def _norm_before(node: ir.Node) -> ir.Node | None:
    """The last op of a norm, if only ops of the norm itself are before this node."""
    last = before = producer(node.inputs[0])
    while before is not None and before.op_type in (*MOVES, "Mul", "Add"):
        before = producer(before.inputs[0])
    is_norm = before is not None and before.op_type in _NORMS
    return last if is_norm and last is not None and last.op_type != "Max" else None


def _has_even_bias(layer: ir.Node) -> bool:
    """Whether a quantized linear layer of rows (not of images) adds nothing, or one number to all its outputs."""
    shape = layer.outputs[0].shape
    if any(producer(value, DEQUANTIZE) is None for value in layer.inputs[:2]) or (shape and len(shape) != 2):
        return False
    bias, readers = layer.inputs[2] if len(layer.inputs) > 2 else None, [use.node for use in layer.outputs[0].uses()]
    if len(readers) == 1 and readers[0].op_type == "Add":
        bias = next((value for value in readers[0].inputs if value is not layer.outputs[0]), None)
    dequantize = producer(bias, DEQUANTIZE)
    numbers = stored(bias if dequantize is None else dequantize.inputs[0])
    return numbers is None or not numpy.ptp(numbers)


def _is_rounded(value: ir.Value | None) -> bool:
    """Whether a QuantizeLinear reads the value, perhaps after ops on each number."""
    nodes = [use.node for use in value.uses()] if value is not None else []
    return any(node.op_type == QUANTIZE or (len(nodes) == 1 and _is_rounded(node.outputs[0])) for node in nodes)


def _has_zero_point(value: ir.Value | None) -> bool:
    node = producer(value, DEQUANTIZE, *MOVES)
    while node is not None and node.op_type in MOVES:
        node = producer(node.inputs[0], DEQUANTIZE, *MOVES)
    return node is not None and len(node.inputs) > 2 and bool(numpy.any(stored(node.inputs[2])))


def _ints(node: ir.Node, name: str) -> list[int]:
    attribute = node.attributes.get(name)
    if attribute is None:
        return []
    return [attribute.as_int()] if attribute.type == ir.AttributeType.INT else [int(one) for one in attribute.as_ints()]
