"""Chains that run as one op (conv + batch norm + activation, add + relu): only the first one quantizes its input."""

from __future__ import annotations

from torch import fx

from sparsebit.graph.ops.op_rows import OpRow

_HEADS = frozenset({"conv", "conv_transpose", "linear"})
_RELUS = frozenset({"relu", "relu6", "hardtanh"})


def absorbed_by(
    graph: fx.Graph, rows: dict[fx.Node, OpRow], activations: frozenset[str] | None
) -> dict[fx.Node, fx.Node]:
    """Per absorbed node, the one before it in the chain. `activations`: those that a runtime absorbs; None: all."""
    absorbed: dict[fx.Node, fx.Node] = {}
    heads: dict[fx.Node, str] = {}
    for node in (node for node in graph.nodes if node in rows):
        row, source = rows[node], next(iter(node.all_input_nodes), None)
        if source in heads and len(source.users) == 1 and _joins(row, heads[source], rows[source], activations):
            absorbed[node] = source
            heads[node] = heads[source]
        if row.name in _HEADS or row.name == "add":
            heads[node] = row.name
    return absorbed


def chain_end(node: fx.Node, absorbed: dict[fx.Node, fx.Node]) -> fx.Node:
    """The last node of the chain that `node` starts."""
    after = {front: back for back, front in absorbed.items()}
    while node in after:
        node = after[node]
    return node


def _joins(row: OpRow, head: str, before: OpRow, activations: frozenset[str] | None) -> bool:
    if before.is_activation:
        return False
    if row.name == "batch_norm":
        return head in _HEADS and before.name in _HEADS
    if not row.is_activation or (activations is not None and row.name not in activations):
        return False
    return head in _HEADS or row.name in _RELUS
