"""Moves zero padding into the convolution after it.

Models from TensorFlow pad before their convolutions. Between two integer convolutions such a Pad runs in float,
with two conversions around it; as the convolution's own `pads` it costs nothing.
"""

from __future__ import annotations

from sparsebit.deploy.onnx_graph.ir_values import producer, stored
from sparsebit.deploy.onnx_graph.packages import ir
from sparsebit.deploy.onnx_graph.qdq_graph import DEQUANTIZE, QUANTIZE


def lay_out_pads(model: ir.Model) -> None:
    """Pad + QuantizeLinear + DequantizeLinear + Conv -> QuantizeLinear + DequantizeLinear + Conv(pads), in place."""
    for conv in list(model.graph):
        auto = conv.attributes.get("auto_pad")
        if conv.op_type != "Conv" or (auto is not None and auto.as_string() not in ("NOTSET", "")):
            continue
        dequantize = _only_producer(conv, DEQUANTIZE)
        quantize = _only_producer(dequantize, QUANTIZE)
        pad = _only_producer(quantize, "Pad")
        if dequantize is not None and quantize is not None and pad is not None and (pads := _zero_pads(pad)):
            _move(model, pad, pads, quantize, dequantize, conv)


def _move(
    model: ir.Model, pad: ir.Node, pads: list[int], quantize: ir.Node, dequantize: ir.Node, conv: ir.Node
) -> None:
    own = conv.attributes["pads"].as_ints() if "pads" in conv.attributes else [0] * len(pads)
    conv.attributes["pads"] = ir.AttrInt64s("pads", [a + b for a, b in zip(own, pads, strict=True)])
    source = pad.inputs[0]
    assert source is not None
    before = producer(source, DEQUANTIZE)
    if before is not None and _same_grid(before, quantize):
        conv.replace_input_with(0, source)  # it is on that grid already
        model.graph.remove([dequantize, quantize, pad], safe=True)
    else:
        quantize.replace_input_with(0, source)
        for node in (quantize, dequantize):
            node.outputs[0].shape = source.shape
        model.graph.remove(pad, safe=True)


def _zero_pads(pad: ir.Node) -> list[int] | None:
    """The pads of height, width, … as Conv counts them; None if batch or channels, or other values, are padded."""
    mode, (amounts, value, axes) = pad.attributes.get("mode"), [*pad.inputs[1:], None, None, None][:3]
    is_constant = mode is None or mode.as_string() == "constant"
    is_zero = value is None or (value.const_value is not None and not stored(value).any())
    # The exporter does not write `axes`.
    if stored(amounts) is None or not is_constant or not is_zero or axes is not None:
        return None
    numbers = [int(amount) for amount in stored(amounts).reshape(-1)]
    ndim = len(numbers) // 2
    if ndim < 3 or any(numbers[axis] for axis in (0, 1, ndim, ndim + 1)) or min(numbers) < 0:
        return None
    return [*numbers[2:ndim], *numbers[ndim + 2 :]]


def _only_producer(node: ir.Node | None, op_type: str) -> ir.Node | None:
    """The producer of the node's first input, if it is of this kind and has no other reader."""
    value = None if node is None else node.inputs[0]
    is_alone = value is not None and len(value.uses()) == 1 and not value.is_graph_output()
    return producer(value, op_type) if is_alone else None


def _same_grid(one: ir.Node, other: ir.Node) -> bool:
    if len(one.inputs) != len(other.inputs) or one.attributes.get("axis") != other.attributes.get("axis"):
        return False
    pairs = [(stored(a), stored(b)) for a, b in zip(one.inputs[1:], other.inputs[1:], strict=True)]
    return all(a is not None and b is not None and a.dtype == b.dtype and bool((a == b).all()) for a, b in pairs)
