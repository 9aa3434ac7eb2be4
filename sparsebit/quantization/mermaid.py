"""The quantized graphs as Mermaid diagrams."""

from __future__ import annotations

from torch import fx

from sparsebit.errors import CaptureError
from sparsebit.graph.capture import Captured
from sparsebit.graph.draw import to_mermaid
from sparsebit.graph.node_names import node_name
from sparsebit.graph.patterns import module_of
from sparsebit.quantization.ops.parameter_reads import QuantizedParameter
from sparsebit.quantization.ops.quant_opr import QuantOpr

_QUANTIZED = (QuantOpr, QuantizedParameter)


def draw(captured: Captured) -> str:
    """Every captured graph, one after the other; quantized ops with their numbers."""
    if not captured.regions:
        raise CaptureError("nothing of this model could be traced, so there is no graph to draw; see coverage")
    if len(captured.regions) == 1:
        return _draw(next(iter(captured.regions.values())).graph_module)
    return "\n".join(f"%% {path or 'model'}\n{_draw(r.graph_module)}" for path, r in captured.regions.items())


def _draw(root: fx.GraphModule) -> str:
    return to_mermaid(root.graph, lambda node: _label(node, root), lambda node: _style(node, root))


def _label(node: fx.Node, root: fx.GraphModule) -> str:
    module = module_of(node, root)
    if module is not None:
        return f"{node_name(node)}<br/>{repr(module) if isinstance(module, _QUANTIZED) else type(module).__name__}"
    if node.op in ("placeholder", "output", "get_attr"):
        return node_name(node)
    return f"{node_name(node)}<br/>{getattr(node.target, '__name__', node.target)}"


def _style(node: fx.Node, root: fx.GraphModule) -> str:
    module = module_of(node, root)
    if module is None:
        return ""
    return "quantized" if isinstance(module, _QUANTIZED) else "float"
