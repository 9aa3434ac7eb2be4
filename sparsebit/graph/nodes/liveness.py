"""When a value is read for the last time."""

from __future__ import annotations

from torch import fx


def last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Per node, the values that no later node reads."""
    dying: dict[fx.Node, list[fx.Node]] = {node: [] for node in graph.nodes}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        for source in node.all_input_nodes:
            if source not in seen:
                seen.add(source)
                dying[node].append(source)
        if node not in seen and node.op != "output":
            seen.add(node)
            dying[node].append(node)
    return dying
