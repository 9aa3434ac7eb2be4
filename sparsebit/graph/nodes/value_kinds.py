"""Facts about a node: whether it produces tensors or Python values, and what it depends on, reads and writes."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from sparsebit.graph.nodes.aliasing import OPERATORS
from sparsebit.graph.nodes.example import UNKNOWN, guard, kind_of, value_of
from sparsebit.graph.values.nested import tensors_of

SIZE_METHODS = {
    "size", "dim", "numel", "nelement", "ndimension", "stride", "item", "tolist", "is_floating_point", "get_device",
    "data_ptr",
}  # fmt: skip
_SIZE_ATTRIBUTES = {
    "shape", "device", "dtype", "ndim", "is_cuda", "requires_grad", "layout", "itemsize", "names", "training"
}  # fmt: skip
_TENSOR_FACTORIES = {
    getattr(torch, name)
    for name in (
        "arange", "zeros", "ones", "full", "empty", "linspace", "eye", "tensor", "as_tensor", "scalar_tensor",
        "rand", "randn", "randint", "randperm",
    )
}  # fmt: skip
_PYTHON_FUNCTIONS = (torch.sym_int, torch.is_floating_point, torch.is_tensor, torch.numel, torch.finfo, torch.iinfo)


def python_values(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose values are sizes, numbers, devices…: arithmetic on them is not part of the network's."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if _yields_python(node, found):
            found.add(node)
    return found


def static_values(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that do not depend on any input's values, only on weights, constants and sizes (a position table)."""
    found = python_values(graph)
    for node in graph.nodes:
        if node.op not in ("placeholder", "output") and all(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def copied(value: Any) -> Any:
    """A copy of a tensor; a number (`gain=1.0` instead of a tensor) unchanged."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def tensor_inputs(value: Any, python: set[fx.Node]) -> list[fx.Node]:
    """The tensor-valued nodes inside one argument (a node, or a nested structure of nodes)."""
    if isinstance(value, fx.Node):
        return [] if value in python else [value]
    if isinstance(value, (list, tuple)):
        return [node for item in value for node in tensor_inputs(item, python)]
    if isinstance(value, dict):
        return tensor_inputs(list(value.values()), python)
    return []


def _yields_python(node: fx.Node, found: set[fx.Node]) -> bool:
    if node.op in ("placeholder", "output"):
        return False
    example = value_of(node)
    if example is not UNKNOWN:
        return not tensors_of(example)
    if node.op == "call_method":
        return node.target in SIZE_METHODS
    if node.op == "get_attr":
        return str(node.target).rpartition(".")[2] == "training"
    if node.op != "call_function" or node.target in _TENSOR_FACTORIES:
        return False
    if node.target in (guard, kind_of, hasattr, *_PYTHON_FUNCTIONS) or (
        node.target is getattr and node.args[1] in _SIZE_ATTRIBUTES
    ):
        return True
    if getattr(node.target, "__module__", None) in ("_operator", "operator", "math", "builtins"):
        inputs = node.all_input_nodes[:1] if node.target is operator.getitem else node.all_input_nodes
        return bool(inputs) and all(source in found for source in inputs)
    return False


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
    """The attribute behind the node's value that training may change (`weight.requires_grad`); None without one."""
    pending = [node]
    for current in pending:
        if current.target is getattr and current.args[1] in ("requires_grad", "grad", "grad_fn", "is_leaf"):
            return str(current.args[1])
        pending.extend(source for source in current.all_input_nodes if source not in pending)
    return None


def asks_for_sizes(node: fx.Node) -> bool:
    """Whether the node only reads sizes of weights (`self.weight.shape[0] // 2`), which need no example."""
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
