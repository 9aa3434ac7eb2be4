"""The nodes that Qualcomm's HTP executes for a file's layers, read from the graph that its compiler gets.

The HTP takes a layer and the conversions around it as one node: it is found by the value that the layer's last
QuantizeLinear writes, or by its own name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparsebit.deploy.audit.onnxruntime_graph import Execution, Kernel
from sparsebit.deploy.onnx_graph.fusion_site import is_layer, label
from sparsebit.deploy.onnx_graph.qdq_graph import DEQUANTIZE, MOVES, QUANTIZE, Graph
from sparsebit.deploy.sessions.htp_simulator import HtpNode
from sparsebit.deploy.sessions.runtime_sessions import Qnn
from sparsebit.deploy.sessions.session import Session

_TOKEN = re.compile(r"_token_\d+$")  # of nodes in another memory layout
_CONVERSIONS = ("Quantize", "Dequantize", "Convert")
# Ops that the HTP computes in the layer before them.
_JOINED = frozenset({QUANTIZE, DEQUANTIZE, "Relu", "Clip", "Add", *MOVES})


def executed(file: Path, graph: Graph, *, num_threads: int = 1) -> tuple[Execution, Session]:
    """The kernels of `graph`'s layers (the graph of `file`) as the HTP runs them, and the open session."""
    session = Qnn(file, num_threads, {})
    by_output = {value: node for node in session.nodes for value in node.outputs}
    by_name = {_TOKEN.sub("", node.name): node for node in session.nodes}
    kernels = {}
    for node in filter(lambda node: is_layer(graph, node), graph.nodes):
        found = _find(graph, node, by_output, by_name)
        kernels[label(node)] = Kernel("", "unknown") if found is None else _kernel(found)
    left = Counter(node.op for node in session.nodes if node.op in _CONVERSIONS)
    return Execution(kernels, dict(left)), session


def _kernel(node: HtpNode) -> Kernel:
    return Kernel(node.op, "float" if node.is_float else "integer")


def _find(graph: Graph, node: Any, by_output: dict[str, HtpNode], by_name: dict[str, HtpNode]) -> HtpNode | None:
    names = [by_name[name] for name in _names(node) if name in by_name]
    outputs = [by_output[value] for value in _ends(graph, node.output[0]) if value in by_output]
    found = (one for one in (*names, *outputs) if one.op not in (*_CONVERSIONS, "Transpose", "Reshape"))
    return next(found, None)


def _names(node: Any) -> Iterator[str]:
    """The node's name, and those that ONNX Runtime and the provider make of it."""
    if node.name:
        yield from (node.name, f"{node.name}/MatMulAddFusion")


def _ends(graph: Graph, value: str, depth: int = 5) -> Iterator[str]:
    """The layer's output, and the values of the ops that may be computed with it."""
    yield value
    for reader in graph.readers[value] if depth else ():
        if reader.op_type in _JOINED:
            yield from _ends(graph, reader.output[0], depth - 1)
