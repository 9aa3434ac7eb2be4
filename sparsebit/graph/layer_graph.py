"""The layers of captured graphs and the connections between them, for a record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from sparsebit.graph.nodes.example import guard
from sparsebit.graph.nodes.graph_module import module_of
from sparsebit.graph.nodes.node_names import node_name
from sparsebit.graph.region import Region
from sparsebit.records.layer_graph import GraphLayer

_HIDDEN = ("placeholder", "get_attr", "output")


def usual_op(node: fx.Node, module: Any) -> str:
    """The name of the operator, or of the module's class."""
    if module is not None:
        return type(module).__name__.lower()
    return str(getattr(node.target, "__name__", node.target))


def layer_graph(
    regions: Mapping[str, Region],
    op_of: Callable[[fx.Node, Any], str] = usual_op,
    is_hidden: Callable[[Any], bool] = lambda module: False,
) -> tuple[GraphLayer, ...]:
    """All layers of all captured graphs, in the order of execution; graphs inside untraced modules are separate.

    `is_hidden`: modules that do not count as layers; readers of their result read the layers before them.
    """
    found: dict[str, GraphLayer] = {}
    for path, region in regions.items():
        seen: dict[fx.Node, tuple[str, ...]] = {}  # the layers whose results a node is
        for node in region.graph_module.graph.nodes:
            module = module_of(node, region.graph_module)
            sources = tuple(dict.fromkeys(name for one in node.all_input_nodes for name in seen[one]))
            if node.op in _HIDDEN or node.target is guard or is_hidden(module):
                seen[node] = sources
                continue
            name = f"{path}.{node_name(node)}" if path else node_name(node)
            seen[node] = (name,)
            known = found.get(name)  # a module that is called several times is one layer
            inputs = tuple(dict.fromkeys((*(known.inputs if known else ()), *sources)))
            found[name] = GraphLayer(name, op_of(node, module), inputs)
    return tuple(found.values())
