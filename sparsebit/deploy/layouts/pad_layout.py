"""Moves zero padding into the convolution after it.

Models from TensorFlow pad before their convolutions. Between two integer convolutions such a Pad runs in float,
with two conversions around it; as the convolution's own `pads` it costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir


def lay_out_pads(model: ir.Model) -> None:
    """Pad + QuantizeLinear + DequantizeLinear + Conv -> QuantizeLinear + DequantizeLinear + Conv(pads), in place."""
    for conv in list(model.graph):
        if conv.op_type != "Conv":
            continue
        dequantize = _only_producer(conv.inputs[0], "DequantizeLinear")
        quantize = _only_producer(dequantize.inputs[0], "QuantizeLinear") if dequantize is not None else None
        pad = _only_producer(quantize.inputs[0], "Pad") if quantize is not None else None
        if dequantize is None or quantize is None or pad is None:
            continue
        pads = _zero_pads(pad)
        if pads is None or not _takes(conv):
            continue
        _move(model, pad, pads, quantize, dequantize, conv)


def _move(
    model: ir.Model, pad: ir.Node, pads: list[int], quantize: ir.Node, dequantize: ir.Node, conv: ir.Node
) -> None:
    import onnx_ir as ir

    own = conv.attributes["pads"].as_ints() if "pads" in conv.attributes else [0] * len(pads)
    conv.attributes["pads"] = ir.AttrInt64s("pads", [a + b for a, b in zip(own, pads, strict=True)])
    source = pad.inputs[0]
    assert source is not None
    before = source.producer()
    if before is not None and before.op_type == "DequantizeLinear" and _same_grid(before, quantize):
        conv.replace_input_with(0, source)  # it is on that grid already
        model.graph.remove([dequantize, quantize, pad], safe=True)
    else:
        quantize.replace_input_with(0, source)
        for node in (quantize, dequantize):
            node.outputs[0].shape = source.shape
        model.graph.remove(pad, safe=True)


def _zero_pads(pad: ir.Node) -> list[int] | None:
    """The pads of height, width, … as Conv counts them; None if batch or channels, or other values, are padded."""
    mode = pad.attributes.get("mode")
    amounts = pad.inputs[1].const_value if len(pad.inputs) > 1 and pad.inputs[1] is not None else None
    if amounts is None or (mode is not None and mode.as_string() != "constant"):
        return None
    if len(pad.inputs) > 3 and pad.inputs[3] is not None:
        return None  # only some axes: the exporter does not write it
    value = pad.inputs[2] if len(pad.inputs) > 2 else None
    if value is not None and (value.const_value is None or bool(value.const_value.numpy().any())):
        return None
    numbers = [int(amount) for amount in amounts.numpy().reshape(-1)]
    ndim = len(numbers) // 2
    if ndim < 3 or any(numbers[axis] for axis in (0, 1, ndim, ndim + 1)) or min(numbers) < 0:
        return None
    return [*numbers[2:ndim], *numbers[ndim + 2 :]]


def _takes(conv: ir.Node) -> bool:
    auto = conv.attributes.get("auto_pad")
    return auto is None or auto.as_string() in ("NOTSET", "")


def _only_producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The producer of the value, if it is of this kind and has no other reader."""
    node = value.producer() if value is not None else None
    if value is None or node is None or node.op_type != op_type or len(value.uses()) != 1 or value.is_graph_output():
        return None
    return node


def _same_grid(one: ir.Node, other: ir.Node) -> bool:
    pairs = list(zip(one.inputs[1:], other.inputs[1:], strict=False))
    if len(one.inputs) != len(other.inputs) or one.attributes.get("axis") != other.attributes.get("axis"):
        return False
    return all(
        a is not None
        and b is not None
        and a.const_value is not None
        and b.const_value is not None
        and a.const_value.dtype == b.const_value.dtype
        and bool((a.const_value.numpy() == b.const_value.numpy()).all())
        for a, b in pairs
    )
