"""Questions about one node of a graph that is being traced: what it depends on, and what it reads or writes."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from sparsebit.graph.nodes.aliasing import OPERATORS
from sparsebit.graph.nodes.example import UNKNOWN, value_of
from sparsebit.graph.nodes.value_kinds import SIZE_METHODS
from sparsebit.graph.values.nested import tensors_of


def depends_on_input(node: fx.Node) -> bool:
    """Whether another input could change the node's value."""
    pending, seen = [node], set()
    while pending:
        current = pending.pop()
        if current.op == "placeholder":
            return True
        if current not in seen:
            seen.add(current)
            pending.extend(current.all_input_nodes)
    return False


def asks_about_training(node: fx.Node) -> str | None:
    """The attribute that the node's value is made from, where training changes it: `weight.requires_grad`."""
    pending = [node]
    for current in pending:
        if current.target is getattr and current.args[1] in ("requires_grad", "grad", "grad_fn", "is_leaf"):
            return str(current.args[1])
        pending.extend(source for source in current.all_input_nodes if source not in pending)
    return None


def asks_for_sizes(node: fx.Node) -> bool:
    """Whether the node only reads sizes of weights, as `self.weight.shape[0] // 2`: known without an example."""
    if node.op == "call_method":
        return node.target in SIZE_METHODS - {"item", "tolist"}
    return getattr(node.target, "__module__", None) in ("_operator", "math", "builtins") and not any(
        tensors_of(value_of(source)) for source in node.all_input_nodes if node.target is not getattr
    )


def is_part_of_input(node: fx.Node) -> bool:
    """Whether the node reads a part of an input that a caller may leave out: `batch["x"]`, `batch.x`."""
    if node.target not in (operator.getitem, getattr) or not isinstance(node.args[0], fx.Node):
        return False
    source, key = node.args[0], node.args[1]
    example: Any = value_of(source)
    is_key = isinstance(key, (str, int)) if node.target is operator.getitem else not hasattr(torch.Tensor, str(key))
    if isinstance(example, torch.Tensor) or (example is UNKNOWN and not is_key):
        return False
    return source.op == "placeholder" or is_part_of_input(source)


def is_write_into(node: fx.Node, name: str) -> bool:
    """Whether the node's value is the parameter or buffer `name` itself, after writes into it."""
    while node.target in OPERATORS or (node.op == "call_method" and str(node.target).endswith("_")):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node.op == "get_attr" and node.target == name
