"""Native graph -> the same function with fewer nodes: no identities or asserts, plain shape access and unbind."""

from __future__ import annotations

import operator

import torch
from torch import fx, nn

from sparsebit.graph.nodes.graph_module import module_of
from sparsebit.graph.rewriting.rewrite import sweep


def simplify(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Rewrite in place: no identities, asserts or dead code; `x.shape[i]` -> `x.size(i)`, `unbind()[i]` -> `select`."""
    for node in list(graph_module.graph.nodes):
        if _is_identity(node, graph_module):
            (source,) = node.args
            assert isinstance(source, fx.Node)
            node.replace_all_uses_with(source)
            graph_module.graph.erase_node(node)
        elif node.target in (torch._assert, fx._symbolic_trace._assert_is_none):
            graph_module.graph.erase_node(node)
        elif node.target is operator.getitem:
            _simplify_getitem(node)
    sweep(graph_module)
    return graph_module


def _is_identity(node: fx.Node, graph_module: fx.GraphModule) -> bool:
    module = module_of(node, graph_module)
    is_plain = type(module) is nn.Identity and not module._forward_hooks and not module._forward_pre_hooks
    return is_plain and len(node.args) == 1 and isinstance(node.args[0], fx.Node) and not node.kwargs


def _simplify_getitem(node: fx.Node) -> None:
    source, index = node.args
    if not isinstance(source, fx.Node) or not isinstance(index, int) or isinstance(index, bool):
        return
    is_shape = source.target is getattr and source.args[1] == "shape"
    is_size = (source.op, source.target) == ("call_method", "size") and len(source.args) == 1 and not source.kwargs
    if is_shape or is_size:
        node.op, node.target, node.args = "call_method", "size", (source.args[0], index)
    elif source.target in ("unbind", torch.unbind):
        dim = source.kwargs.get("dim", source.args[1] if len(source.args) > 1 else 0)
        tensor = source.kwargs.get("input", source.args[0] if source.args else None)
        if isinstance(tensor, fx.Node):
            node.op, node.target, node.args = "call_method", "select", (tensor, dim, index)
