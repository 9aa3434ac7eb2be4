"""Whether Python code outside the graph may write into its arguments. Where that is not known, it may."""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache, lru_cache
from types import FunctionType
from typing import Any

import torch.nn.functional as F
from torch import nn

from sparsebit.graph.graph_module import CapturedGraph


def module_may_write(module: nn.Module) -> bool:
    """Whether a call of the module, which runs code of its own, may write into its arguments."""
    parts = list(module.modules())
    kinds: list[Any] = [type(part.source if isinstance(part, CapturedGraph) else part) for part in parts]
    return any(getattr(part, "inplace", False) is True for part in parts) or any(map(_class_may_write, kinds))


def code_may_write(model: nn.Module) -> bool:
    """Whether code in a captured model that is no graph may write into tensors that layers have read."""
    parts = list(model.modules())
    kinds: list[Any] = [type(part) for part in parts if not isinstance(part, CapturedGraph)]
    return any(getattr(part, "inplace", False) is True for part in parts) or any(map(_class_may_write, kinds))


def function_may_write(function: Any) -> bool:
    """Whether a call of a function of the user's own may write into its arguments."""
    return _may_write(function)


def may_write_parameters(model: nn.Module) -> bool:
    """Whether a forward of the model may write into its parameters: clip a weight, say."""
    parts = list(model.modules())
    kinds: list[Any] = [type(part) for part in parts]
    return any(getattr(part, "max_norm", None) is not None for part in parts) or any(map(_class_may_train, kinds))


@lru_cache(maxsize=4096)
def _class_may_write(kind: Any) -> bool:
    return any(map(_may_write, _own_functions(kind)))


@lru_cache(maxsize=4096)
def _class_may_train(kind: Any) -> bool:
    return any(map(_may_write_parameters, _own_functions(kind)))


def _own_functions(kind: Any) -> list[FunctionType]:
    own = (base for base in kind.__mro__ if base.__module__.partition(".")[0] not in ("torch", "sparsebit", "builtins"))
    members = (member for base in own for member in vars(base).values())
    functions = (member.__func__ if isinstance(member, (staticmethod, classmethod)) else member for member in members)
    return [function for function in functions if isinstance(function, FunctionType)]


def _may_write(function: FunctionType) -> bool:
    tree = _tree_of(function)
    return tree is None or any(_is_write(node) for node in ast.walk(tree))


def _may_write_parameters(function: FunctionType) -> bool:
    tree = _tree_of(function)
    if tree is None:
        return True
    writes = [node for node in ast.walk(tree) if _is_write(node)]
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return bool(writes) and (not names.isdisjoint(_PARAMETERS) or any(_is_written_in_self(node) for node in writes))


def _tree_of(function: FunctionType) -> ast.AST | None:
    """The function's code; None where it is not known. `__init__` counts as empty: no call runs it."""
    if function.__name__ == "__init__":
        return ast.Module([], [])
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None


_PARAMETERS = frozenset({"data", "parameters", "named_parameters", "_parameters", "state_dict", "weight", "bias"})


def _is_written_in_self(node: Any) -> bool:
    """Whether the write goes into something that `self` holds, as far as its line tells; a plain counter does too."""
    if isinstance(node, ast.AugAssign):
        places: list[Any] = [node.target]
    elif isinstance(node, ast.Assign):
        places = [target for target in node.targets if _is_memory(target)]
    else:
        places = [node.func, *node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "out")]
    return any(isinstance(part, ast.Name) and part.id == "self" for place in places for part in ast.walk(place))


def _is_memory(target: ast.expr) -> bool:
    """Whether an assignment to it writes into a tensor: `x[0] = ...`, `x.data = ...`."""
    return isinstance(target, ast.Subscript) or (isinstance(target, ast.Attribute) and target.attr == "data")


def _is_write(node: Any) -> bool:
    if isinstance(node, ast.AugAssign):
        return True
    if isinstance(node, ast.Assign):
        return any(map(_is_memory, node.targets))
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    by_name = name.endswith("_") and not name.endswith("__")
    by_flag = any(keyword.arg in ("out", "inplace") for keyword in node.keywords)
    return by_name or by_flag or _is_flagged(node, name)


def _is_flagged(call: ast.Call, name: str) -> bool:
    """Whether a function of torch.nn.functional takes `inplace` by position."""
    place = _inplace_places().get(name)
    if place is None or len(call.args) <= place:
        return False
    flag = call.args[place]
    return not isinstance(flag, ast.Constant) or bool(flag.value)


@cache
def _inplace_places() -> dict[str, int]:
    functions = ((name, function) for name, function in vars(F).items() if isinstance(function, FunctionType))
    parameters = {name: list(inspect.signature(function).parameters) for name, function in functions}
    return {name: names.index("inplace") for name, names in parameters.items() if "inplace" in names}
