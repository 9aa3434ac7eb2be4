"""Patterns of files that a runtime computes in its own way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onnx import numpy_helper

from sparsebit.deploy.onnx_graph.qdq_graph import QUANTIZE, Graph, attribute

_LAYERS = ("Conv", "ConvTranspose", "Gemm")


def has_16_bits(graph: Graph) -> bool:
    """A quantized activation of 16 bits."""
    return any(graph.type_of(node.output[0]).endswith("int16") for node in _sites(graph))


def has_float_bias(graph: Graph) -> bool:
    """A layer with a stored float bias."""
    layers = (node for node in graph.nodes if node.op_type in _LAYERS)
    return any(len(node.input) > 2 and node.input[2] in graph.initializers for node in layers)


def has_float_weight(graph: Graph) -> bool:
    """A layer with a stored float weight that reads a tensor of one scale."""
    layers = (node for node in graph.nodes if node.op_type in _LAYERS and node.input[1] in graph.initializers)
    return any((grid := graph.dequantized(node.input[0])) is not None and grid.per_tensor for node in layers)


def has_bare_linear(graph: Graph) -> bool:
    """A quantized linear layer, without a bias or with equal numbers, and a QuantizeLinear behind simple operators."""
    return any(
        node.op_type in ("MatMul", "Gemm")
        and all(graph.dequantized(name) is not None for name in node.input[:2])
        and _is_even(graph, node)
        and any(_comes_from(graph, site, node.op_type) for site in _sites(graph))
        for node in graph.nodes
    )


def _is_even(graph: Graph, layer: Any) -> bool:
    readers = graph.readers[layer.output[0]]
    if any(reader.op_type == "Max" and reader.input[0] == reader.input[1] for reader in readers):
        return False  # as the export writes it
    names = list(layer.input[2:]) or [name for node in readers if node.op_type == "Add" for name in node.input[1:]]
    known = [graph.producer[name].input[0] if name in graph.producer else name for name in names]
    biases = [numpy_helper.to_array(graph.initializers[name]) for name in known if name in graph.initializers]
    return not any(bias.size > 1 and bias.min() != bias.max() for bias in biases)


def has_strided_padding(graph: Graph) -> bool:
    """A 1x1 convolution with a stride and padding, of its own or of a Pad before it."""
    return any(
        set(attribute(node, "kernel_shape", [])) == {1}
        and max(attribute(node, "strides", [1])) > 1
        and (any(attribute(node, "pads", [])) or _comes_from(graph, node, "Pad"))
        for node in graph.nodes
        if node.op_type == "Conv"
    )


def has_counted_padding(graph: Graph) -> bool:
    """An average of a quantized tensor with a zero point, which counts padding."""
    return any(
        attribute(node, "count_include_pad", 0)
        and any(attribute(node, "pads", []))
        and (grid := graph.dequantized(node.input[0])) is not None
        and not grid.symmetric
        for node in graph.nodes
        if node.op_type == "AveragePool"
    )


def has_quantized_maximum(graph: Graph) -> bool:
    """A maximum or minimum over axes that a QuantizeLinear rounds, behind any simple operators."""
    ends = ("ReduceMax", "ReduceMin", "GlobalMaxPool")
    return any(_comes_from(graph, node, *ends) for node in _sites(graph))


def has_clipped_norm(graph: Graph) -> bool:
    """A norm, a Clip and a QuantizeLinear in a row."""
    return any(
        (clip := graph.producer.get(node.input[0])) is not None
        and clip.op_type == "Clip"
        and _comes_from(graph, clip, "LayerNormalization", "InstanceNormalization", "GroupNormalization")
        for node in _sites(graph)
    )


def _comes_from(graph: Graph, node: Any, *ops: str) -> bool:
    """Whether one of the ops is before the node, without a quantizer or a value that is read twice between them."""
    before = graph.producer.get(node.input[0])
    while before is not None and before.op_type != QUANTIZE:
        if before.op_type in ops:
            return True
        if not before.input or (len(before.input) > 1 and before.input[0] == before.input[1]):
            return False
        before = graph.producer.get(before.input[0])
    return False


def _sites(graph: Graph) -> Iterator[Any]:
    return (node for node in graph.nodes if node.op_type == QUANTIZE and not graph.is_weight(node.input[0]))
