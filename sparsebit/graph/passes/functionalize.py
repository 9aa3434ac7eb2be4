"""In-place ops -> out-of-place ones, so that a value is what its node computed, whoever runs later."""

from __future__ import annotations

import operator

import torch
from torch import fx, nn

from sparsebit.graph.patterns import module_of

_OPERATORS = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
# Writing through one of these reaches the tensor it was taken from, so such a write must stay a write.
_VIEWS = {"view", "reshape", "transpose", "permute", "select", "narrow", "chunk", "split", "unbind", "squeeze", "unsqueeze", "expand", "flatten", "getitem", "t", "detach"}


def functionalize(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Rewrite in place: later readers of an overwritten value read the op's result; `inplace` flags are cleared."""
    order = {node: index for index, node in enumerate(graph_module.graph.nodes)}
    for node in list(graph_module.graph.nodes):
        source = _overwritten(node, graph_module)
        if source is None or _is_view(source):
            continue
        for reader in [user for user in source.users if user is not node and order[user] > order[node]]:
            reader.replace_input_with(source, node)
        _clear(node, graph_module)
    graph_module.recompile()
    return graph_module


def _overwritten(node: fx.Node, root: fx.GraphModule) -> fx.Node | None:
    source = node.args[0] if node.args else node.kwargs.get("input")
    if not isinstance(source, fx.Node):
        return None
    if node.op == "call_module" and getattr(module_of(node, root), "inplace", False) is True:
        return source
    if node.op == "call_function" and (node.target in _OPERATORS or node.kwargs.get("inplace") is True):
        return source
    if node.op == "call_method" and _is_inplace_name(str(node.target)):
        return source
    return None


def _clear(node: fx.Node, root: fx.GraphModule) -> None:
    if node.op == "call_module":
        module = module_of(node, root)
        assert isinstance(module, nn.Module)
        module.inplace = False  # type: ignore[assignment]
    elif node.op == "call_method":
        plain = str(node.target).removesuffix("_")
        if hasattr(torch.Tensor, plain):
            node.target = plain
    elif node.target in _OPERATORS:
        node.target = _OPERATORS[node.target]  # type: ignore[index]
    else:
        node.kwargs = {**node.kwargs, "inplace": False}


def _is_view(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op in ("call_function", "call_method") and str(name) in _VIEWS or node.op == "get_attr"


def _is_inplace_name(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")
