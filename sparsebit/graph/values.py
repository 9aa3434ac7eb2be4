"""What flows along an edge: tensors, or sizes and other Python values."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_SIZE_METHODS = {"size", "dim", "numel", "nelement", "ndimension", "stride", "item", "tolist", "is_floating_point", "get_device", "data_ptr"}
_SIZE_ATTRIBUTES = {"shape", "device", "dtype", "ndim", "is_cuda", "requires_grad", "layout", "itemsize", "names", "training"}
_TENSOR_FACTORIES = ("arange", "zeros", "ones", "full", "empty", "rand", "randn", "linspace", "eye", "tensor", "scalar_tensor")


def python_values(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that yield sizes, numbers, devices…: arithmetic on them is Python's, not the network's."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if _yields_python(node, found):
            found.add(node)
    return found


def static_values(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that no input reaches: computed from weights and constants alone (a standardised weight, a position table)."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op not in ("placeholder", "output") and all(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _yields_python(node: fx.Node, found: set[fx.Node]) -> bool:
    if node.op == "call_method" and node.target in _SIZE_METHODS:
        return True
    if node.op == "get_attr":
        return str(node.target).endswith("training")
    if node.op != "call_function":
        return False
    if node.target is getattr and node.args[1] in _SIZE_ATTRIBUTES:
        return True
    if getattr(node.target, "__name__", "") in _TENSOR_FACTORIES and getattr(torch, node.target.__name__, None) is not None:
        return False
    module = getattr(node.target, "__module__", None)
    if module in ("_operator", "operator", "math", "builtins") or node.target in (operator.getitem, torch.sym_int):
        inputs = node.all_input_nodes
        return bool(inputs) and (node.target is operator.getitem and inputs[0] in found or all(n in found for n in inputs))
    return False


def tensor_inputs(value: Any, python: set[fx.Node]) -> list[fx.Node]:
    """The tensor-valued nodes inside one argument (a node, or a list of nodes)."""
    if isinstance(value, fx.Node):
        return [] if value in python else [value]
    if isinstance(value, (list, tuple)):
        return [node for item in value for node in tensor_inputs(item, python)]
    return []
