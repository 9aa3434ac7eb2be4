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


@lru_cache(maxsize=4096)
def _class_may_write(kind: Any) -> bool:
    own = (base for base in kind.__mro__ if base.__module__.partition(".")[0] not in ("torch", "sparsebit", "builtins"))
    return any(_may_write(member) for base in own for member in vars(base).values() if isinstance(member, FunctionType))


def _may_write(function: FunctionType) -> bool:
    if function.__name__ == "__init__":
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return True
    return any(_is_write(node) for node in ast.walk(tree))


def _is_write(node: Any) -> bool:
    if isinstance(node, ast.AugAssign):
        return True
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Subscript) for target in node.targets)
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
