"""Keeps layers and ops float in ONNX Runtime that the simulation computes in float.

ONNX Runtime's WeightBiasQuantization rounds the float weight of a Conv, ConvTranspose or Gemm to int8, with one scale
for all channels, if the layer reads a DequantizeLinear and a QuantizeLinear reads its output. Releases before
1.22 do not even check the output. A MatMul with a bias becomes a Gemm first. It does not change a layer whose input has
a scale per channel. So such a layer gets a separate DequantizeLinear, with the one scale repeated for every channel:
the same numbers, at the same cost.

An Add, Mul, average pool, Softmax or product of two computed values between the two becomes a QLinear kernel, with a
separate rounding. If the simulation computes it in float, a Max with the lowest float, which changes no number,
prevents that: these kernels do not check the number of scales, and fail on several.

The same transformer rounds the float bias of a quantized layer to int32, with the product of both scales. Files of
backends that add biases in float (virtual, tensorrt) get such a Max after a layer if that would change the result.
Files for ONNX Runtime get it too: a layer there has a float bias if its weight has a zero point. A bias that would not
fit into int32 is kept by a Max before the layer, which then reads no DequantizeLinear.

The kernel of a Softmax between two of them (QLinearSoftmax) writes zeros if the step of its result is less than
exp(-5) / (the number of its inputs): the sum overflows. Such a Softmax reads a Max too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from typing import Any

from sparsebit.deploy.exporting.qdq import ROLE_KEY
from sparsebit.deploy.onnx_graph.ir_values import become, is_single, producer, remove_unread, stored, stored_once
from sparsebit.deploy.onnx_graph.packages import ir, numpy
from sparsebit.deploy.onnx_graph.qdq_graph import DEQUANTIZE, FLOAT_KEY, MOVES, OFF_KEY, QUANTIZE

_LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
# How many of an op's inputs are data.
_OPS = {"Add": 2, "Mul": 2, "MatMul": 2, "AveragePool": 1, "GlobalAveragePool": 1, "Softmax": 1}
# Ops that keep the values of their input: the runtime moves a DequantizeLinear through `_TRAVELS`, up to the layer.
_TRAVELS, _CASTS = MOVES | {"MaxPool", "Slice"}, MOVES | {"Cast"}
# An int32 bias shares its accumulator with the products.
_LARGEST_BIAS = 1 << 30
# An error of a sixteenth of a step, uniform, adds 0.07 dB to the noise of rounding to the step.
_BIAS_ERROR = 1 / 16
# QLinearSoftmax scales exp(x) to at most exp(-5) of float32's range for each input, before it divides by the step.
_SOFTMAX_ROOM = math.exp(5) / 2


def keep_floats(model: ir.Model) -> None:
    """Change the inputs of float layers and ops so that ONNX Runtime leaves them float, and mark them, in place."""
    _keep_layers(model)
    _keep_ops(model)


def keep_softmaxes(model: ir.Model) -> None:
    """Insert a Max before every Softmax whose integer kernel would overflow, in place."""
    for node in list(model.graph):
        x = node.inputs[0] if node.op_type == "Softmax" else None
        if x is None or _dequantize_of(x) is None:
            continue
        axis = node.attributes["axis"].as_int() if "axis" in node.attributes else -1
        room = _SOFTMAX_ROOM * max(_size(x, axis % len(x.shape)) if x.shape is not None else 1, 1)
        if any(float(_numbers(one.inputs[1]).min()) * room < 1 for one in _quantizes(node.outputs[0])):
            node.replace_input_with(0, _unfused(model, x))


def keep_float_biases(model: ir.Model) -> None:
    """Insert a Max at layers whose float bias or weight ONNX Runtime would round to other numbers, in place."""
    for layer in list(model.graph):
        x = _dequantize_of(layer.inputs[0]) if layer.op_type in _LAYERS else None
        if x is None or (layer.op_type == "MatMul" and not _has_weight(layer.inputs[1])):
            continue
        output, bias = _biased(layer)
        step = min((float(_numbers(node.inputs[1]).min()) for node in _quantizes(output)), default=None)
        is_quantized = _is_quantized(layer.inputs[1])
        if step is None:
            before = layer.inputs[0]
            if is_quantized and before and bias and _is_clipped(bias, x, layer.inputs[1]):
                layer.replace_input_with(0, _unfused(model, before))
            continue
        if is_quantized and (bias is None or _bias_error(bias, x, layer.inputs[1]) <= _BIAS_ERROR * step):
            continue
        uses, kept = list(output.uses()), _unfused(model, output)
        for reader, index in uses:
            reader.replace_input_with(index, kept)


def _biased(layer: ir.Node) -> tuple[ir.Value, ir.Value | None]:
    """The layer's output with its constant bias, and the bias; for a MatMul it is in a separate Add."""
    output = layer.outputs[0]
    if layer.op_type != "MatMul":
        bias = layer.inputs[2] if len(layer.inputs) > 2 else None
        return output, bias if bias is not None and bias.const_value is not None else None
    readers = [reader for reader, _ in output.uses()]
    if len(readers) == 1 and readers[0].op_type == "Add" and not output.is_graph_output():
        other = next((value for value in readers[0].inputs if value is not output), None)
        if other is not None and other.const_value is not None:
            return readers[0].outputs[0], other
    return output, None


def _bias_error(bias: ir.Value, x: ir.Node, weight: ir.Value | None) -> float:
    """The change of the bias when it is rounded to int32 with the product of both scales."""
    numbers, scale = _numbers(bias).reshape(-1), _bias_scale(bias, x, weight)
    if scale is None:
        return math.inf
    rounded = numpy.clip(numpy.round(numbers / scale), -_LARGEST_BIAS, _LARGEST_BIAS) * scale
    return float(numpy.abs(numbers - rounded).max(initial=0.0))


def _is_clipped(bias: ir.Value, x: ir.Node, weight: ir.Value | None) -> bool:
    """Whether the bias would not fit into int32."""
    scale = _bias_scale(bias, x, weight)
    return scale is not None and bool((numpy.abs(_numbers(bias).reshape(-1)) > _LARGEST_BIAS * scale).any())


def _bias_scale(bias: ir.Value, x: ir.Node, weight: ir.Value | None) -> Any:
    """The product of both scales, for each number of the bias; None for a weight in groups."""
    _, dequantize = _origin(weight, _CASTS)
    if dequantize is None or "block_size" in dequantize.attributes:
        return None
    scale = _numbers(x.inputs[1]) * _numbers(dequantize.inputs[1]).reshape(-1)
    return numpy.resize(scale, _numbers(bias).size)


def _numbers(value: ir.Value | None) -> Any:
    return stored(value).astype("float64")


def _keep_layers(model: ir.Model) -> None:
    dequantized: dict[tuple[ir.Value, ir.Value], ir.Value] = {}
    for layer in list(model.graph):
        if layer.op_type not in _LAYERS or _is_quantized(layer.inputs[1]):
            continue
        if layer.op_type == "MatMul" and not _is_constant(layer.inputs[1]):
            continue
        layer.metadata_props[FLOAT_KEY] = layer.op_type
        x = layer.inputs[0]
        source = _dequantize_of(x)
        if source is None or x is None:
            continue
        scale = source.inputs[1]
        assert scale is not None
        if (x, scale) not in dequantized:
            dequantized[x, scale] = _apart(model, x, source)
        layer.replace_input_with(0, dequantized[x, scale])
        remove_unread(model, source)


def _keep_ops(model: ir.Model) -> None:
    """Keep ops in float unless they round to a separate site; if only the reader rounds a result, the op is float."""
    kept: dict[ir.Value, ir.Value] = {}
    for op in list(model.graph):
        data = op.inputs[: _OPS.get(op.op_type, 0)]
        if not data or any(_dequantize_of(x) is None for x in data):
            continue
        if op.op_type == "MatMul" and any(map(_has_weight, data)):
            continue  # a layer with a weight: quantized, or kept above
        roles = {node.metadata_props.get(ROLE_KEY) for node in _quantizes(op.outputs[0])}
        # A mean over images (`x.mean((2, 3))`) has no site, and the integer kernel computes the same numbers.
        is_mean = op.op_type == "GlobalAveragePool" and OFF_KEY not in op.metadata_props
        # Before a float value, only a product has an integer kernel (MatMulIntegerToFloat).
        if (not roles and op.op_type != "MatMul") or "output" in roles or is_mean:
            continue
        op.metadata_props[FLOAT_KEY] = op.op_type
        x = data[0]
        assert x is not None
        if x not in kept:
            kept[x] = _unfused(model, x)
        op.replace_input_with(0, kept[x])


def _quantizes(value: ir.Value) -> Iterator[ir.Node]:
    """Every QuantizeLinear that the runtime may join to the producer of the value."""
    for reader, _ in value.uses():
        if reader.op_type == QUANTIZE:
            yield reader
        elif reader.op_type in _TRAVELS | {"Relu", "Clip"} and len(reader.outputs) == 1:
            yield from _quantizes(reader.outputs[0])


def _origin(value: ir.Value | None, ops: Set[str]) -> tuple[ir.Value | None, ir.Node | None]:
    """The value before a chain of these ops, and its producer."""
    while (node := producer(value, *ops)) is not None and len(node.outputs) == 1:
        value = node.inputs[0]
    return value, producer(value)


def _is_constant(weight: ir.Value | None) -> bool:
    value, node = _origin(weight, _CASTS)
    return value is not None and (value.const_value is not None or (node is not None and node.op_type == "Constant"))


def _is_quantized(weight: ir.Value | None) -> bool:
    _, node = _origin(weight, _CASTS)
    return node is not None and node.op_type == DEQUANTIZE


def _has_weight(x: ir.Value | None) -> bool:
    """Whether `x` is constant, or dequantized from numbers that the file stores."""
    source = _dequantize_of(x)
    return _is_constant(x) or (source is not None and stored(source.inputs[0]) is not None)


def _dequantize_of(x: ir.Value | None) -> ir.Node | None:
    """The DequantizeLinear of one scale whose grid `x` is still on."""
    _, node = _origin(x, _TRAVELS)
    return node if node is not None and node.op_type == DEQUANTIZE and is_single(node.inputs[1]) else None


def _apart(model: ir.Model, x: ir.Value, source: ir.Node) -> ir.Value:
    """The numbers of `x`, dequantized separately; values moved after its DequantizeLinear become integers again."""
    axis = next((dim for dim in (1, *range(len(x.shape or ()))) if _size(x, dim) > 1), None)
    if axis is None:  # no axis to repeat a scale along: an op that changes no number prevents the fusion
        return _unfused(model, x)
    codes, *grid = (value for value in source.inputs if value is not None)
    name, note = f"{source.name}/float", dict(source.metadata_props)
    if x is not source.outputs[0]:
        name, kind = f"{source.name}/{x.name}", codes.dtype
        assert kind is not None
        codes = _add(model, x, QUANTIZE, [x, *grid], f"{name}/q", x, note)
        codes.type = ir.TensorType(kind)
        name = f"{name}/dq"
    size = _size(x, axis)
    grid = [
        stored_once(model, f"{one.name}/{size}", numpy.repeat(stored(one).reshape(-1), size), one.const_value.dtype)
        for one in grid
        if one.const_value is not None
    ]
    return _add(model, codes, DEQUANTIZE, [codes, *grid], name, x, note, {"axis": axis})


def _add(
    model: ir.Model,
    behind: ir.Value,
    op_type: str,
    inputs: list[ir.Value],
    name: str,
    like: ir.Value,
    metadata: dict[str, str],
    attributes: dict[str, int] | None = None,
) -> ir.Value:
    node = ir.node(op_type, inputs, attributes, name=name, metadata_props=metadata)
    maker = producer(behind)
    if maker is None:
        model.graph.insert_before(model.graph[0], node)
    else:
        model.graph.insert_after(maker, node)
    return become(node.outputs[0], like, name)


def _unfused(model: ir.Model, x: ir.Value) -> ir.Value:
    """The same numbers after a Max with the lowest float, which no integer kernel fuses."""
    lowest = stored_once(model, "sparsebit/lowest", numpy.array(numpy.finfo(numpy.float32).min))
    return _add(model, x, "Max", [x, lowest], f"{x.name}/float", x, {})


def _size(x: ir.Value, axis: int) -> int:
    """The size, or 0 if it is free or unknown."""
    size = x.shape[axis] if x.shape is not None and axis < len(x.shape) else None
    return size if isinstance(size, int) else 0
