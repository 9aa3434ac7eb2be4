"""Which values of a graph may share memory, and which nodes write into it.

A node is a value only as long as nothing writes into its memory, also through a view. Passes and quantizers, which move
or copy values, ask here first. The answers are on the safe side: where it is not known, memory counts as shared, and
unknown code counts as writing (`hidden_writes.py`). It uses torch's op schemas, and lists for what these do not say.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from functools import cache
from types import FunctionType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import fx, nn

from sparsebit.graph.nodes.graph_module import module_of
from sparsebit.graph.nodes.hidden_writes import function_may_write, module_may_write

# In-place operators of Python, and their out-of-place forms: `operator.iadd` -> `operator.add`.
OPERATORS: dict[Any, Callable[..., Any]] = {
    getattr(operator, f"i{name.rstrip('_')}"): getattr(operator, name)
    for name in (
        "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift"
    )
}  # fmt: skip
_WRITING_DUNDERS = {"__setitem__", *(f"__{operation.__name__}__" for operation in OPERATORS)}
_PASSING = (nn.Identity, nn.Flatten, nn.Unflatten, nn.modules.dropout._DropoutNd)


class Families:
    """Groups of nodes whose values may share memory; nodes can be added."""

    def __init__(self) -> None:
        self._family: dict[fx.Node, set[fx.Node]] = {}

    def of(self, node: fx.Node) -> set[fx.Node]:
        return self._family.get(node, {node})

    def join(self, node: fx.Node, other: fx.Node) -> None:
        merged = self.of(node) | self.of(other)
        for member in merged:
            self._family[member] = merged


def may_alias(node: fx.Node, root: fx.GraphModule) -> Iterator[fx.Node]:
    """The inputs whose memory the node's value may share."""
    module = module_of(node, root)
    if module is not None:
        of_torch = type(module).__module__.startswith("torch.nn.")
        if isinstance(module, _PASSING) or not of_torch or getattr(module, "inplace", False) is True:
            yield from node.all_input_nodes
    elif node.op in ("call_function", "call_method"):
        name = str(getattr(node.target, "__name__", node.target))
        if name in ("broadcast_tensors", "meshgrid"):
            yield from node.all_input_nodes
        elif name == "einsum":  # with one operand it may only move axes, and return a view
            yield from node.all_input_nodes if len(node.all_input_nodes) == 1 else ()
        elif node.target is getattr:
            yield from node.all_input_nodes[:1] if may_hold_view(str(node.args[1])) else ()
        elif may_be_view(name) or overwritten(node, root) is not None:
            yield from node.all_input_nodes[:1]


def overwritten(node: fx.Node, root: fx.GraphModule) -> fx.Node | None:
    """The value that the node writes into, if any."""
    if node.op not in ("call_module", "call_function", "call_method"):
        return None
    if isinstance(out := node.kwargs.get("out"), fx.Node):
        return out
    source, module = node.args[0] if node.args else node.kwargs.get("input"), module_of(node, root)
    if module is not None:
        is_write = any(getattr(part, "inplace", False) is True for part in module.modules())
    else:
        is_write = writes_by_name(node.target) or (node.op == "call_function" and is_inplace_call(node))
    return source if isinstance(source, fx.Node) and is_write else None


def written_by(node: fx.Node, root: fx.GraphModule) -> list[fx.Node]:
    """The values that the node may write into: the overwritten one, or the arguments of code outside the graph."""
    known, module = overwritten(node, root), module_of(node, root)
    if module is not None:
        is_hidden = not type(module).__module__.startswith("torch.nn.") and module_may_write(module)
    else:
        is_hidden = is_users_function(node) and function_may_write(cast("FunctionType", node.target))
    return node.all_input_nodes if is_hidden else [] if known is None else [known]


def is_users_function(node: fx.Node) -> bool:
    """Whether the node calls a function that is neither torch's nor ours, so that its effects are unknown."""
    function = node.target
    is_function = node.op == "call_function" and isinstance(function, FunctionType)
    return is_function and function.__module__.partition(".")[0] not in ("torch", "sparsebit")


def writes_by_name(target: Any) -> bool:
    """Whether a function or method with that name writes into its first argument: `x.add_`, `torch.relu_`, `x += y`."""
    if getattr(target, "__module__", None) == "_operator":
        return target is operator.setitem or target in OPERATORS
    name = str(getattr(target, "__name__", target))
    return name in _WRITING_DUNDERS or (name.endswith("_") and not name.endswith("__"))


def is_inplace_call(node: fx.Node) -> bool:
    """`F.relu(x, inplace=True)`, by position or by name."""
    if node.kwargs.get("inplace") is True:
        return True
    if getattr(node.target, "__module__", None) != F.__name__ or not any(argument is True for argument in node.args):
        return False
    parameters = list(inspect.signature(node.target).parameters)  # type: ignore[arg-type]
    return "inplace" in parameters and dict(zip(parameters, node.args, strict=False)).get("inplace") is True


def written_later(graph_module: fx.GraphModule) -> set[fx.Node]:
    """Nodes whose memory some node of the graph overwrites, perhaps through a view: reading a copy would be wrong."""
    families = Families()
    sources: list[fx.Node] = []
    for node in graph_module.graph.nodes:
        for other in may_alias(node, graph_module):
            families.join(node, other)
        sources += written_by(node, graph_module)
    return {member for source in sources for member in families.of(source)}


def writes_through_data(graph_module: fx.GraphModule) -> bool:
    """Whether a node writes through `.data`, which autograd does not see: a backward then reads what was written."""
    views: set[fx.Node] = set()
    for node in graph_module.graph.nodes:
        if node.target is getattr and node.args[1] == "data":
            views.add(node)
        elif any(source in views for source in written_by(node, graph_module)):
            return True
        elif any(source in views for source in may_alias(node, graph_module)):
            views.add(node)
    return False


# Ops that may return their input or a view of it although their schema does not say so: attributes, conversions to the
# type or form that a tensor has already, dropout in eval mode, views that autograd does not track, Python's operators.
_UNSAID = {
    "alpha_dropout", "as_tensor", "asarray", "atleast_1d", "atleast_2d", "atleast_3d", "bfloat16", "bool", "byte",
    "cdouble", "cfloat", "chalf", "char", "conj_physical", "copy", "data", "dequantize", "double", "dropout",
    "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout", "feature_dropout", "float", "getitem", "half",
    "attention_layout", "clear_padding", "int", "long", "pos", "rename", "resize", "resize_as", "short", "sum_to_size",
    "T", "H", "to_dense", "type", "type_as", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes",
}  # fmt: skip


def may_be_view(name: str) -> bool:
    """Whether the result of an op of that name may share memory with the op's first input."""
    return name in _UNSAID or name in _views()


def may_hold_view(attribute: str) -> bool:
    """Whether an attribute may share memory with what it is read from: a tensor's view, or the field of a container."""
    of_tensor = getattr(torch.Tensor, attribute, None)
    return may_be_view(attribute) or of_tensor is None or callable(of_tensor)


@cache
def _views() -> frozenset[str]:
    """The names of all ops with a result that the schema marks as an alias, and not as a write."""
    return frozenset(
        schema.name.removeprefix("aten::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::")
        and any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns)
    )
