"""Finds chains that a runtime fuses into one op (conv + batch norm + activation, add + relu).

Only the first op of a chain quantizes its input: between fused ops there is no tensor to round. The file has the name
of the config key that switches this off, `SCHEDULE.DISABLE_UNNECESSARY_QUANT`.
"""

from __future__ import annotations

from torch import fx

from sparsebit.graph.ops.op_rows import OpRow

_HEADS = frozenset({"conv", "conv_transpose", "linear"})
_RELUS = frozenset({"relu", "relu6", "hardtanh"})


def absorbed_by(
    graph: fx.Graph, rows: dict[fx.Node, OpRow], activations: frozenset[str] | None
) -> dict[fx.Node, fx.Node]:
    """Maps each absorbed node to the one before it in its chain.

    `activations`: names of the activation functions that the runtime fuses; None: all.
    """
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
    """Whether an op is fused into the chain that begins with a `head`, after the op `before`."""
    if before.is_activation:
        return False
    if row.name == "batch_norm":
        return head in _HEADS and before.name in _HEADS
    if not row.is_activation or (activations is not None and row.name not in activations):
        return False
    return head in _HEADS or row.name in _RELUS
