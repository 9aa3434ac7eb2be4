"""In-place ops -> out-of-place ones, so that a node's value is not changed by later nodes.

Only where the write cannot be seen anywhere else. It stays in place if it goes through a view that is read later, into
a buffer, or into the caller's tensor: an out-of-place op would not change these.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from sparsebit.graph.nodes.aliasing import OPERATORS, Families, is_inplace_call, may_alias, overwritten
from sparsebit.graph.nodes.example import value_of
from sparsebit.graph.nodes.graph_module import module_of
from sparsebit.graph.nodes.value_kinds import python_values


def functionalize(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Rewrite in place: later readers of an overwritten value read the op's result; `inplace` flags are cleared.

    A write stays a write where it can be seen elsewhere: through a view, in a buffer, or in the caller's own
    tensor.
    """
    graph = graph_module.graph
    order = {node: index for index, node in enumerate(graph.nodes)}
    python = python_values(graph)
    families = Families()
    plain: set[fx.Node] = set()
    kept: set[Any] = set()
    relied_on: set[Any] = set()  # modules whose input is read after they have written into it
    for node in list(graph.nodes):
        source = overwritten(node, graph_module)
        is_hidden = source is not None and not _is_seen(families.of(source), source, node, order)
        if source is not None and (source in python or is_hidden) and _has_plain_form(node, graph_module):
            if source not in python:  # `height += 1` makes a new number; earlier readers keep the old one
                for reader in [user for user in source.users if order[user] > order[node]]:
                    reader.replace_input_with(source, node)
                    relied_on.update({node.target} if node.op == "call_module" else ())
                python.discard(node)  # `x[0] = y` has no value, but the op that replaces it produces a tensor
                node.meta["example"] = value_of(source)
            plain.add(node)
            continue
        kept.update({node.target} if node.op == "call_module" else ())
        for other in may_alias(node, graph_module):
            families.join(node, other)
    for node in plain:
        if node.target not in kept:  # a module that must write in one of its calls writes in all
            if node.target in relied_on:  # the source's own code needs the module that writes
                parent, _, name = str(node.target).rpartition(".")
                graph_module.get_submodule(parent)._modules[name] = copy.copy(module_of(node, graph_module))
            _clear(node, graph_module)
    graph_module.recompile()
    return graph_module


def with_item(value: Any, key: Any, item: Any) -> Any:
    """`value[key] = item` on a copy."""
    copied = value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)
    copied[key] = item
    return copied


def _is_seen(family: set[fx.Node], source: fx.Node, node: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether a write by `node` into `source` shows in another value that is read later, or outlives the call."""
    later = (user for other in family - {source} for user in other.users if order[user] > order[node])
    outlives = any(member.op in ("get_attr", "placeholder") for member in family)  # a buffer, or the caller's tensor
    return outlives or any(True for _ in later)


def _has_plain_form(node: fx.Node, root: fx.GraphModule) -> bool:
    if node.op == "call_module":
        return getattr(module_of(node, root), "inplace", False) is True
    if node.op == "call_method":
        return callable(getattr(torch.Tensor, str(node.target).removesuffix("_"), None))
    return node.target in OPERATORS or is_inplace_call(node) or _plain_function(node.target) is not None


def _clear(node: fx.Node, root: fx.GraphModule) -> None:
    """Make the op an out-of-place one."""
    target: Any = node.target
    if node.op == "call_module":
        module = module_of(node, root)
        assert module is not None
        module.inplace = False  # type: ignore[assignment]
    elif node.op == "call_method":
        node.target = target.removesuffix("_")
    elif target in OPERATORS:
        node.target = OPERATORS[target]
    elif "inplace" in node.kwargs:
        node.kwargs = {**node.kwargs, "inplace": False}
    elif is_inplace_call(node):
        node.update_arg(list(inspect.signature(target).parameters).index("inplace"), False)
    else:
        plain = _plain_function(target)
        assert plain is not None
        node.target = plain


def _plain_function(target: Any) -> Callable[..., Any] | None:
    """The out-of-place form of a function, such as `torch.relu` for `torch.relu_`; None if there is none."""
    if target is operator.setitem:
        return with_item
    name = str(getattr(target, "__name__", ""))
    plain = name.removesuffix("_")
    return (getattr(torch, plain, None) or getattr(F, plain, None)) if name != plain else None
