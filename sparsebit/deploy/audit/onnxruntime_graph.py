"""The kernels that ONNX Runtime runs, read from the optimized graph that it writes when a session opens.

Fusions rename and merge nodes, so a layer of the file is found by its name, by the names that fusions derive from
it, and by the outputs of the layer or of the ops fused after it (`Finder`).
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsebit.deploy.onnx_graph.fusion_site import FusionSite, is_heavy, is_layer, label
from sparsebit.deploy.onnx_graph.packages import onnx
from sparsebit.deploy.onnx_graph.qdq_graph import DEQUANTIZE, MOVES, QUANTIZE, Graph
from sparsebit.deploy.sessions.runtime_sessions import open_session
from sparsebit.deploy.sessions.session import Session
from sparsebit.records.audit import Arithmetic

_PRODUCTS = frozenset(
    {"MatMul", "FusedMatMul", "Gemm", "FusedGemm", "QGemm", "QLinearMatMul", "MatMulInteger", "MatMulIntegerToFloat",
     "DynamicQuantizeMatMul", "MatMulNBits", "FusedMatMulActivation", "GemmFloat8", "Attention", "MultiHeadAttention",
     "QAttention"}
)  # fmt: skip
# The kernels that can replace a heavy op of the file.
_FAMILIES = {
    "Conv": frozenset({"Conv", "FusedConv", "NhwcFusedConv", "QLinearConv", "ConvInteger"}),
    **dict.fromkeys(("Gemm", "MatMul"), _PRODUCTS),
}
_INTEGER = frozenset(
    {"QGemm", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "ConvInteger", "QAttention",
     "DynamicQuantizeLSTM", "DynamicQuantizeLinear"}
)  # fmt: skip
_WEIGHT_ONLY = frozenset({"MatMulNBits", "GatherBlockQuantized", "MatMulBnb4"})
# Ops that a fusion may merge into the layer before them.
_JOINED = frozenset({QUANTIZE, "Relu", "Clip", "Add", *MOVES})
_CONVERSIONS = (QUANTIZE, DEQUANTIZE, "DynamicQuantizeLinear")
_BYTES = ("int8", "uint8")
_ANY_TYPE = frozenset({"NhwcMaxPool", "MaxPool", "Concat", "Resize", *MOVES})


@dataclass(frozen=True)
class Kernel:
    """The runtime's kernel for a layer: the name of its own op, and its arithmetic.

    `rounds_weight`: the weight is float in the file, and the runtime itself rounds it to integers.
    """

    op: str
    arithmetic: Arithmetic
    rounds_weight: bool = False


@dataclass(frozen=True)
class Execution:
    """A runtime's own graph: the kernel of each layer, and the remaining conversions between them."""

    kernels: dict[str, Kernel]
    leftovers: dict[str, int]


def executed(
    file: Path, graph: Graph, *, num_threads: int = 1, options: Mapping[str, str] | None = None
) -> tuple[Execution, Session]:
    """The kernels of `graph`'s layers (the graph of `file`) as ONNX Runtime runs them here, and the open session."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "optimized.onnx"
        session = open_session(file, "onnxruntime", num_threads=num_threads, optimized_file=target, options=options)
        optimized = Graph(onnx.load(str(target), load_external_data=False))
    finder = Finder(graph, optimized)
    kernels: dict[str, Kernel] = {}
    for node in filter(lambda node: is_layer(graph, node), graph.nodes):
        found = finder.find(node)
        if found is None:
            kernels[label(node)] = Kernel("", "unknown")
            continue
        arithmetic = arithmetic_of(optimized, found)
        is_rounded = arithmetic != "float" or (
            len(found.input) > 1 and optimized.dequantized(found.input[1]) is not None
        )
        rounds = FusionSite(graph, node).has_float_weight and is_rounded
        kernels[label(node)] = Kernel(found.op_type, arithmetic, rounds)
    left = Counter(node.op_type for node in optimized.nodes if node.op_type in _CONVERSIONS)
    return Execution(kernels, dict(left)), session


def arithmetic_of(optimized: Graph, node: Any) -> Arithmetic:
    """By the operator's name; for ops that accept any type (MaxPool, Concat, Resize), by their input type."""
    if node.op_type in _WEIGHT_ONLY:
        return "weight-only"
    if node.op_type.startswith("QLinear") or node.op_type in _INTEGER:
        return "integer"
    return "integer" if node.input and _is_byte(optimized, node.input[0]) else "float"


def _is_byte(optimized: Graph, name: str) -> bool:
    """Whether the value is an integer tensor; the values that a fusion added have no type in the file."""
    if kind := optimized.type_of(name):
        return kind in _BYTES
    node = optimized.producer.get(name)
    if node is None or node.op_type == QUANTIZE or node.op_type.startswith("QLinear"):
        return node is not None
    return node.op_type in _ANY_TYPE and _is_byte(optimized, node.input[0])


class Finder:
    """Finds a layer of the file in the optimized graph: by name, by the names that fusions make, by its outputs."""

    def __init__(self, graph: Graph, optimized: Graph) -> None:
        self._graph, self._optimized = graph, optimized
        self._by_name = {node.name: node for node in optimized.nodes if node.name}
        original = {node.name for node in graph.nodes}
        # "conv_token_1", "fused fc", "mm/MatMulAddFusion", "conv_out_nchwc": names that only the runtime makes.
        self._renamed = [node for node in optimized.nodes if node.name and node.name not in original]

    def find(self, node: Any) -> Any:
        return next((candidate for candidate in self._candidates(node) if _may_be(node, candidate)), None)

    def _candidates(self, node: Any) -> Iterator[Any]:
        name, ends = node.name, list(self._ends(node.output[0]))
        if name and name in self._by_name:
            yield self._by_name[name]
        starts = (f"{name}_token_", f"{name}/")
        for other in self._renamed if name else ():
            if other.name == f"fused {name}" or other.name.startswith(starts):
                yield other
        blocked = tuple(f"{value}_nchwc" for value in ends)
        yield from (other for other in self._renamed if other.name.startswith(blocked))
        for value in ends:
            yield from self._makers(value)
        # Last resort: a fusion may rename the node and all its outputs, but it keeps the names of its initializers.
        if is_heavy(node.op_type):
            for name in node.input[1:4]:
                yield from self._optimized.readers[self._stored(name)]

    def _ends(self, value: str, depth: int = 4) -> Iterator[str]:
        """The layer's output and the values that a fusion may end at: after a Relu, an Add, a Q."""
        yield value
        for reader in self._graph.readers[value] if depth else ():
            if reader.op_type in _JOINED:
                yield from self._ends(reader.output[0], depth - 1)

    def _stored(self, name: str) -> str:
        """The initializer of a weight; fusions keep its name."""
        node = self._graph.producer.get(name)
        while node is not None and node.op_type in {*MOVES, QUANTIZE, DEQUANTIZE}:
            name = node.input[0]
            node = self._graph.producer.get(name)
        return name if name in self._graph.initializers else ""

    def _makers(self, value: str) -> Iterator[Any]:
        """The node that computes the value in the optimized graph, and those before ops that move or cast values."""
        node = self._optimized.producer.get(value)
        while node is not None:
            yield node
            moves = node.op_type in ("Transpose", "Reshape", "ReorderOutput", QUANTIZE, DEQUANTIZE)
            node = self._optimized.producer.get(node.input[0]) if moves else None


def _may_be(node: Any, candidate: Any) -> bool:
    """Whether the optimized node can be the layer; a light layer may be fused into the producer of its output."""
    if candidate.op_type in (*_CONVERSIONS, "Transpose", "Reshape", "ReorderOutput"):
        return False
    if not is_heavy(node.op_type):
        return True
    family = _FAMILIES.get(node.op_type, frozenset())
    return candidate.op_type in family or candidate.op_type == node.op_type or node.op_type in _INTEGER | _WEIGHT_ONLY
