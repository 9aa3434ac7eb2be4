"""The layers of a quantized model and the connections between them, without the quantizers, for a record."""

from __future__ import annotations

from typing import Any

from torch import fx

from sparsebit.graph.nodes.example import guard
from sparsebit.graph.nodes.graph_module import module_of
from sparsebit.quantization.faithful.simulation import SimulatedModel
from sparsebit.quantization.ops.quant_opr import QIdentity, QuantOpr
from sparsebit.quantization.planning.sites import layer_name
from sparsebit.records.layer_graph import GraphLayer

_HIDDEN = ("placeholder", "get_attr", "output")


def layer_graph(qmodel: SimulatedModel) -> tuple[GraphLayer, ...]:
    """All layers of all captured graphs, in the order of execution; graphs inside untraced modules are separate."""
    found: dict[str, GraphLayer] = {}
    for path, region in qmodel.built.captured.regions.items():
        seen: dict[fx.Node, tuple[str, ...]] = {}  # the layers whose results a node is
        for node in region.graph_module.graph.nodes:
            module = module_of(node, region.graph_module)
            sources = tuple(dict.fromkeys(name for one in node.all_input_nodes for name in seen[one]))
            if node.op in _HIDDEN or node.target is guard or isinstance(module, QIdentity):
                seen[node] = sources
                continue
            name = layer_name(path, node)
            seen[node] = (name,)
            known = found.get(name)  # a module that is called several times is one layer
            inputs = tuple(dict.fromkeys((*(known.inputs if known else ()), *sources)))
            found[name] = GraphLayer(name, _op(node, module), inputs)
    return tuple(found.values())


def _op(node: fx.Node, module: Any) -> str:
    if isinstance(module, QuantOpr):
        return str(module.row.name)
    if module is not None:
        return type(module).__name__.lower().removeprefix("integer")
    return str(getattr(node.target, "__name__", node.target))
