"""Nodes that exporters wrote apart, joined to the operator that they came from: fewer places to round at.

A linear layer is a MatMul and the Add of its bias; before opset 17 a LayerNormalization is nine nodes, before 20 a Gelu
is five, and SiLU is x * Sigmoid(x). Runtimes join them too; a quantizer in between would keep them from it.
"""

from __future__ import annotations

from typing import Any

from sparsebit.deploy.onnx_graph.packages import onnx
from sparsebit.deploy.onnx_graph.qdq_graph import Graph


def joined_nodes(model: Any, nodes: list[Any]) -> list[Any]:
    """The nodes in order, with known groups replaced by one node each."""
    graph = Graph(model)
    gone: set[int] = set()
    made: dict[int, Any] = {}
    for node in nodes:
        if id(node) not in gone and (group := _bias_group(graph, node)) is not None:
            matmul, add, joined = group
            gone.add(id(matmul))
            made[id(add)] = joined
    return [made.get(id(node), node) for node in nodes if id(node) not in gone]


def _bias_group(graph: Graph, node: Any) -> tuple[Any, Any, Any] | None:
    """A MatMul with a constant matrix whose only reader adds a constant vector."""
    if node.op_type != "MatMul" or len(graph.readers[node.output[0]]) != 1 or node.output[0] in graph.outputs:
        return None
    weight, add = _dims(graph, node.input[1]), graph.readers[node.output[0]][0]
    if add.op_type != "Add" or weight is None or len(weight) != 2:
        return None
    other = add.input[1] if add.input[0] == node.output[0] else add.input[0]
    bias = _dims(graph, other)
    if bias is None or not bias or bias[-1] != weight[-1] or any(size != 1 for size in bias[:-1]) or len(bias) > 2:
        return None
    joined = onnx.helper.make_node(
        "MatMulAddBias", [*node.input, other], list(add.output), name=node.name, domain="sparsebit"
    )
    joined.metadata_props.extend(node.metadata_props)
    return node, add, joined


def _dims(graph: Graph, name: str) -> list[int] | None:
    """The shape of a stored tensor, also behind a Transpose of two axes."""
    stored = graph.stored(name)
    if stored is not None:
        return list(stored.dims)
    node = graph.producer.get(name)
    if node is not None and node.op_type == "Transpose":
        inner = graph.stored(node.input[0])
        if inner is not None and len(inner.dims) == 2:
            return list(inner.dims)[::-1]
    return None
