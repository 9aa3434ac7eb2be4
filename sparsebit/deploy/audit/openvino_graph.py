"""The kernels that OpenVINO runs, read from the execution graph of the compiled model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparsebit.deploy.audit.onnxruntime_graph import Execution, Kernel
from sparsebit.deploy.onnx_graph.fusion_site import FusionSite, is_heavy, is_layer, label
from sparsebit.deploy.onnx_graph.qdq_graph import DEQUANTIZE, QUANTIZE, Graph
from sparsebit.deploy.sessions.runtime_sessions import open_session
from sparsebit.deploy.sessions.session import Session
from sparsebit.records.audit import Arithmetic

_HEAVY_TYPES = frozenset(
    {"Convolution", "Deconvolution", "FullyConnected", "MatMul", "RNNSeq", "RNNCell", "LSTMSequence", "LSTMCell",
     "ScaledDotProductAttention", "ScaledDotProductAttentionWithKVCache", "MHA"}
)  # fmt: skip
_BYTES = ("i8", "u8")
_LOW_BITS = (*_BYTES, "i4", "u4", "nf4", "u2")
_CONVERSIONS = ("Subgraph", "FakeQuantize", "Eltwise", "Convert")
# Nodes that the frontend creates around a Q or DQ.
_FRONTEND = ("Convert_", "Subtract_", "Multiply_", "Constant_")


def executed(file: Path, graph: Graph, *, num_threads: int = 1) -> tuple[Execution, Session]:
    """The kernels of `graph`'s layers (the graph of `file`) as OpenVINO runs them here, and the open session."""
    session: Any = open_session(file, "openvino", num_threads=num_threads)
    running = Executed(session, graph)
    kernels: dict[str, Kernel] = {}
    for node in filter(lambda node: is_layer(graph, node), graph.nodes):
        found = running.op_of(node)
        kernels[label(node)] = Kernel(found.words, _arithmetic(found)) if found else Kernel("", "unknown")
    return Execution(kernels, _leftovers(running.ops, graph)), session


class Executed:
    """The execution graph of a compiled model, with the graph of its file."""

    def __init__(self, session: Any, graph: Graph) -> None:
        self.graph = graph
        self.ops = [ExecutedOp(op) for op in session.compiled.get_runtime_model().get_ordered_ops()]
        self._by_origin: dict[str, list[ExecutedOp]] = {}
        for op in self.ops:
            for origin in op.origins:
                self._by_origin.setdefault(origin, []).append(op)

    def op_of(self, node: Any) -> ExecutedOp | None:
        """The op that contains a node of the file."""
        bias = FusionSite(self.graph, node).bias_add  # OpenVINO names a product after the Add of its bias
        return _find(node, self._by_origin) or (_find(bias, self._by_origin) if bias is not None else None)

    def arithmetic_of(self, name: str) -> Arithmetic:
        """The arithmetic of the op of this name."""
        return next((_arithmetic(op) for op in self.ops if op.name == name), "unknown")


class ExecutedOp:
    """One op of the execution graph, with readable fields."""

    def __init__(self, op: Any) -> None:
        info = op.get_rt_info()
        self.name: str = op.get_friendly_name()
        self.layer_type = _text(info, "layerType")
        self.precision = _text(info, "runtimePrecision").lower()
        self.primitive = _text(info, "primitiveType")
        self.origins = [name for name in _text(info, "originalLayersNames").split(",") if name]
        self.input_types = [port.get_element_type().to_string() for port in op.inputs()]
        self.words = f"{self.layer_type} {self.primitive}"

    @property
    def heavy(self) -> bool:
        return self.layer_type in _HEAVY_TYPES


def _find(node: Any, by_origin: dict[str, list[ExecutedOp]]) -> ExecutedOp | None:
    """The op that contains a layer; for a heavy layer, the heavy one of several."""
    found = [op for name in _names(node) for op in by_origin.get(name, ())]
    wanted = [op for op in found if op.heavy == is_heavy(node.op_type)]
    return next(iter(wanted or found), None)


def _names(node: Any) -> Iterator[str]:
    """Names that OpenVINO's ONNX frontend may use for the node."""
    for base in (node.name, *node.output):
        if base:
            yield from (f"{base}/WithoutBiases", base, f"{base}_original", f"{base}/MatMul")


def _arithmetic(op: ExecutedOp) -> Arithmetic:
    """A heavy kernel has the arithmetic in its name; a light one computes in the type of its first input."""
    if op.primitive.lower().endswith(("_i8", "_u8")) or (not op.heavy and op.precision in _BYTES):
        return "integer"
    low_weight = op.layer_type == "FullyConnected" and any(kind in _LOW_BITS for kind in op.input_types[1:2])
    return "weight-only" if low_weight else "float"


def _leftovers(ops: list[ExecutedOp], graph: Graph) -> dict[str, int]:
    """Ops that only quantize, dequantize or reorder."""
    pairs = [node for node in graph.nodes if node.op_type in (QUANTIZE, DEQUANTIZE)]
    names = {name for node in pairs for name in (label(node), *node.output)}
    left: Counter[str] = Counter()
    for op in ops:
        own = [name for name in op.origins if not name.startswith(_FRONTEND)]
        if op.layer_type == "Reorder":
            left["Reorder"] += 1
        elif op.layer_type in _CONVERSIONS and own and names.issuperset(own):
            left["Quantize/Dequantize"] += 1
    return dict(left)


def _text(info: Any, key: str) -> str:
    if key not in info:
        return ""
    value = info[key]
    return str(value.astype(str)) if hasattr(value, "astype") else str(value)
