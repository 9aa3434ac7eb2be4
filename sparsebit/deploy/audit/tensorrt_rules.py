"""TensorRT's rules for quantized ONNX files, as a table: errors of its parser, and advice for its optimizer.

TensorRT does not run here, so only the structure of the file is checked. Every rule is a generator of (node, message)
and cites its source by title: NVIDIA TensorRT documentation, "Working with Quantized Types" (types, symmetric scheme),
"Explicit Quantization" (Q/DQ on weights and activations, placement), "ONNX Opset Guide" (opsets 9 to 25);
ONNX-TensorRT, "Supported ONNX Operators" (`docs/operators.md`) and the checks in its importer of QuantizeLinear and
DequantizeLinear.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from sparsebit.deploy.comparing.float_operators import is_integer_operator
from sparsebit.deploy.onnx_graph.fusion_site import label
from sparsebit.deploy.onnx_graph.qdq_graph import (
    DEQUANTIZE,
    MOVES,
    QUANTIZE,
    Graph,
    Quantization,
    attribute,
    load_model,
    opset,
)

_TYPES = frozenset({"int8", "float8e4m3fn", "int4", "float4e2m1"})
_FOUR_BITS = frozenset({"int4", "float4e2m1"})
_WEIGHTED = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
_FIRST_OPSET, _LAST_OPSET, _AXIS_OPSET, _FLOAT8_OPSET = 10, 25, 13, 19

_QUANTIZED_TYPES = "Working with Quantized Types"
_EXPLICIT = "Explicit Quantization"
_OPERATORS = "Supported ONNX Operators"
_OPSETS = "ONNX Opset Guide"

Severity = Literal["error", "advice"]
Found = Iterator[tuple[Any, str]]


@dataclass(frozen=True)
class Violation:
    """`severity`: TensorRT rejects an `error`; a file with `advice` builds, but runs slower than it could."""

    node: str
    rule: str
    severity: Severity
    message: str
    remedy: str
    source: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.node}: {self.message}; {self.remedy} (TensorRT: {self.source})"


@dataclass(frozen=True)
class Rule:
    """`check` yields (node, message) for every place in the graph where the rule is broken; no node: the whole file."""

    name: str
    severity: Severity
    source: str
    remedy: str
    check: Callable[[Graph], Found]


def tensorrt_violations(model: str | os.PathLike[str] | Any) -> list[Violation]:
    """Every rule of TensorRT that a quantized file (a path or a ModelProto) breaks, errors first."""
    graph = Graph(load_model(model))
    found = [
        Violation(label(node) if node else "the file", rule.name, rule.severity, message, rule.remedy, rule.source)
        for rule in RULES
        for node, message in rule.check(graph)
    ]
    return sorted(found, key=lambda violation: violation.severity != "error")


def _pairs(graph: Graph) -> Iterator[tuple[Any, Quantization]]:
    """Every Q and DQ node, except the DQ of an int32 bias, which has a separate rule."""
    for node in graph.nodes:
        if node.op_type in (QUANTIZE, DEQUANTIZE):
            found = graph.quantization(node)
            if found.dtype != "int32":
                yield node, found


def _weights(graph: Graph) -> Iterator[tuple[Any, Any, Quantization]]:
    """(weighted node, DQ node, its quantization) for every quantized weight."""
    for node in graph.nodes:
        found = graph.dequantized(node.input[1]) if node.op_type in _WEIGHTED else None
        if found is not None and graph.is_weight(node.input[1]):
            yield node, found.node, found


def _activations(graph: Graph) -> Iterator[tuple[Any, Quantization]]:
    return ((node, found) for node, found in _pairs(graph) if not graph.is_weight(node.input[0]))


def _opset(graph: Graph) -> Found:
    version = opset(graph.model)
    pairs = list(_pairs(graph))
    if pairs and not _FIRST_OPSET <= version <= _LAST_OPSET:
        yield None, f"opset {version}; Q/DQ are read from opset {_FIRST_OPSET} to {_LAST_OPSET}"
    elif version < _AXIS_OPSET and any(found.scale is not None and found.scale.size > 1 for _, found in pairs):
        yield None, f"opset {version}; scales per channel need the axis of opset {_AXIS_OPSET}"
    elif version < _FLOAT8_OPSET and any(found.dtype.startswith("float8") for _, found in pairs):
        yield None, f"opset {version}; 8-bit floats need opset {_FLOAT8_OPSET}"


def _numbers(wrong: Callable[[Quantization], str], of: Callable[[Graph], Any] = _pairs) -> Callable[[Graph], Found]:
    """The check of every pair (or activation) by its numbers alone; an empty text: right."""
    return lambda graph: ((node, fault) for node, found in of(graph) if (fault := wrong(found)))


def _scales(graph: Graph) -> Found:
    for node, found in _pairs(graph):
        kind = graph.type_of(node.input[1])
        if found.scale is None:
            yield node, "its scale is computed at run time"
        elif not (found.scale.astype("float32") > 0).all():
            yield node, "a scale is not above 0"
        elif kind not in ("float", "float16", "bfloat16"):
            yield node, f"scale of type {kind}; allowed: float, float16, bfloat16"


def _activation_scales(found: Quantization) -> str:
    is_several = found.scale is not None and found.scale.size > 1 and found.dtype != "float4e2m1"  # fp4 has blocks
    return f"{found.scale.size} scales on an activation; one is allowed" if is_several else ""


def _channel_axis(graph: Graph) -> Found:
    for node, dequantize, found in _weights(graph):
        shape = graph.stored(_source(graph, dequantize))
        if found.scale is None or found.scale.size == 1 or found.block or shape is None:
            continue
        rank = len(shape.dims)
        axis, wanted = found.axis % rank, _output_axis(node, rank)
        moved = any(reader.op_type in MOVES for reader in graph.readers[dequantize.output[0]])
        if axis != wanted and not moved:
            message = f"scales along axis {axis} of the weight of {label(node)}; its output channels are axis {wanted}"
            yield dequantize, message
        elif found.scale.size != shape.dims[axis]:
            yield dequantize, f"{found.scale.size} scales for {shape.dims[axis]} channels"


def _blocks(graph: Graph) -> Found:
    for _, dequantize, found in _weights(graph):
        stored = graph.stored(_source(graph, dequantize))
        shape = list(stored.dims) if stored is not None else []
        if found.block and found.dtype not in _FOUR_BITS:
            yield dequantize, f"scales in blocks on {found.dtype}; blocks are for 4-bit weights"
        elif found.block and shape and shape[found.axis] % found.block:
            yield dequantize, f"blocks of {found.block} do not divide {shape[found.axis]}"
        if found.dtype in _FOUR_BITS and shape and math.prod(shape) % 2:
            yield dequantize, f"{math.prod(shape)} elements of 4 bits; their number must be even"


def _well_formed(graph: Graph) -> Found:
    inputs = {value.name for value in graph.model.graph.input}
    for node in graph.nodes:
        if node.op_type == QUANTIZE:
            wrong = [reader for reader in graph.readers[node.output[0]] if reader.op_type != DEQUANTIZE]
            for reader in wrong:
                yield node, f"its integers are read by {reader.op_type} {label(reader)}; only DequantizeLinear may"
        elif node.op_type == DEQUANTIZE:
            source = graph.producer.get(node.input[0])
            stored = graph.stored(node.input[0]) is not None or node.input[0] in inputs
            if not stored and (source is None or source.op_type != QUANTIZE):
                made_by = "nothing" if source is None else f"{source.op_type} {label(source)}"
                yield node, f"its integers come from {made_by}; allowed: QuantizeLinear, a stored weight"


def _float_weights(graph: Graph) -> Found:
    for node in graph.nodes:
        if node.op_type in _WEIGHTED and graph.is_weight(node.input[1]):
            data, weight = (graph.dequantized(name) for name in node.input[:2])
            if (data is None) != (weight is None) and (weight is None or weight.dtype not in _FOUR_BITS):
                yield node, f"only its {'weight' if data is None else 'input'} is quantized, so it runs in float"
            elif data and weight and data.dtype != weight.dtype and "float8e4m3fn" in (data.dtype, weight.dtype):
                yield node, f"its input is {data.dtype} and its weight {weight.dtype}, so it runs in float"


def _distant_weights(graph: Graph) -> Found:
    for node, dequantize, _ in _weights(graph):
        if dequantize.output[0] not in node.input:
            yield node, f"{graph.producer[node.input[1]].op_type} is between its weight's DequantizeLinear and it"


def _batch_norm(graph: Graph) -> Found:
    for node in graph.nodes:
        if node.op_type in _WEIGHTED and graph.dequantized(node.input[0]) is not None:
            for reader in graph.behind(node.output[0]):
                if reader.op_type == "BatchNormalization":
                    yield reader, f"a batch norm after the quantized {label(node)}"


def _split_activation(graph: Graph) -> Found:
    for node in graph.nodes:
        readers = graph.readers[node.output[0]] if node.op_type in _WEIGHTED else []
        for q in (reader for reader in readers if reader.op_type == QUANTIZE):
            behind = [n for dq in graph.readers[q.output[0]] for n in graph.readers[dq.output[0]]]
            if behind and all(n.op_type in ("Relu", "Clip", "BatchNormalization") for n in behind):
                yield q, f"Q/DQ between {label(node)} and its {behind[0].op_type}, which keeps the two apart"


def _concat(graph: Graph) -> Found:
    for node in graph.nodes:
        found = [graph.dequantized(name) for name in node.input] if node.op_type == "Concat" else []
        known = [one for one in found if one is not None]
        if len(known) > 1 and not all(one.same_grid(known[0]) for one in known):
            yield node, "its inputs have different scales, so they are requantized"


def _residual(graph: Graph) -> Found:
    for node in graph.nodes:
        if node.op_type == "Add" and not any(graph.is_weight(name) for name in node.input):
            makers = [graph.producer.get(name) for name in node.input]
            bare = [maker for maker in makers if maker is not None and maker.op_type == "Conv"]
            is_float = all(graph.dequantized(name) is None for name in node.input)
            if bare and is_float and graph.dequantized(bare[0].input[0]):
                yield node, f"the skip connection into it is in float, so {label(bare[0])} is not fused with the add"


def _output_axis(node: Any, rank: int) -> int:
    """The axis of a weight's output channels: K of KCRS for Conv, of CKRS for ConvTranspose, columns of a product."""
    if node.op_type == "Gemm":
        return 0 if attribute(node, "transB", 0) else 1
    return {"Conv": 0, "ConvTranspose": 1}.get(node.op_type, rank - 1)


def _source(graph: Graph, dequantize: Any) -> str:
    """The stored value of a weight's DQ: the integers, or the float weight before the Q."""
    node = graph.producer.get(dequantize.input[0])
    return str(node.input[0] if node is not None and node.op_type == QUANTIZE else dequantize.input[0])


_SYMMETRIC = "A.QSCHEME: per-tensor-symmetric and W.QSCHEME: per-channel-symmetric (BACKEND: tensorrt sets both)"

RULES: tuple[Rule, ...] = (
    Rule("operators", "error", _OPERATORS, "export QDQ, not integer operators",
         lambda graph: ((node, f"operator {node.op_type} is not supported") for node in graph.nodes
                        if is_integer_operator(node))),
    Rule("opset", "error", _OPSETS, "export with opset 20 or 21", _opset),
    Rule("types", "error", _QUANTIZED_TYPES, _SYMMETRIC, _numbers(
        lambda found: "" if found.dtype in _TYPES else
        f"quantized type {found.dtype}; allowed: {', '.join(sorted(_TYPES))}")),
    Rule("zero-points", "error", _OPERATORS, _SYMMETRIC, _numbers(
        lambda found: "" if found.symmetric else f"zero point {found.zero_point.ravel()[0]}; only 0 is allowed")),
    Rule("scales", "error", _EXPLICIT, "calibrate, so that every scale is a positive constant", _scales),
    Rule("activation-scales", "error", _EXPLICIT, "A.QSCHEME: per-tensor-symmetric",
         _numbers(_activation_scales, _activations)),
    Rule("activation-bits", "error", _QUANTIZED_TYPES, "A.QUANTIZER.BIT: 8, or weights only", _numbers(
        lambda found: "an activation of type int4, which is for weights only" if found.dtype == "int4" else "",
        _activations)),
    Rule("bias", "error", _OPERATORS, "keep the bias in float (BACKEND: tensorrt does)",
         lambda graph: ((node, "a DequantizeLinear on int32 (a quantized bias)") for node in graph.nodes
                        if node.op_type == DEQUANTIZE and graph.quantization(node).dtype == "int32")),
    Rule("channel-axis", "error", _EXPLICIT, "W.QSCHEME: per-channel-symmetric, one scale per output channel",
         _channel_axis),
    Rule("blocks", "error", _EXPLICIT, "W.QUANTIZER.BIT: 4 with a group size that divides the weight", _blocks),
    Rule("pairs", "error", _EXPLICIT, "let a DequantizeLinear follow every QuantizeLinear at once", _well_formed),
    Rule("both-operands", "advice", _EXPLICIT, "quantize all inputs of weighted layers", _float_weights),
    Rule("weight-next-to-layer", "advice", _EXPLICIT, "store the weight as the layer reads it", _distant_weights),
    Rule("batch-norm", "advice", _EXPLICIT, "SCHEDULE.FUSE_BN: true", _batch_norm),
    Rule("activation-fusion", "advice", _EXPLICIT, "SCHEDULE.DISABLE_UNNECESSARY_QUANT: true quantizes after it",
         _split_activation),
    Rule("concat-scales", "advice", _EXPLICIT, "one scale for all inputs of a concat", _concat),
    Rule("residual-add", "advice", _EXPLICIT, "A.QADD.ENABLE_QUANT: true, or BACKEND: tensorrt", _residual),
)  # fmt: skip
