"""Whether Python code outside of a graph may write into tensors, judged by its source code without running it.

`module_may_write` and `function_may_write`: into its arguments, which decides whether values may be shared or must be
copied. `may_write_parameters`: into parameters, which decides whether a reference run may share them. The source is
parsed, and every statement that could be a write counts (`x[0] = y`, `x.add_()`, `x += y`, `inplace=True`), also in
functions of the user's that it calls by name. Where the source is not known, the answer is "it may".
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from functools import cache, lru_cache
from types import FunctionType, MethodType
from typing import Any

import torch.nn.functional as F
from torch import nn

from sparsebit.graph.nodes.graph_module import CapturedGraph
from sparsebit.graph.values.code import MAX_FUNCTIONS, closed_over, is_foreign, names_in


def module_may_write(module: nn.Module) -> bool:
    """Whether a call of the module, which runs its own code, may write into its arguments."""
    return _any_may_write([part.source if isinstance(part, CapturedGraph) else part for part in module.modules()])


def code_may_write(model: nn.Module) -> bool:
    """Whether code of a captured model that runs outside its graphs may write into tensors that layers have read."""
    return _any_may_write([part for part in model.modules() if not isinstance(part, CapturedGraph)])


def function_may_write(function: Any) -> bool:
    """Whether a call of a user's function, or one that it calls by name, may write into the function's arguments."""
    return _may_write(function) or any(map(_writes_into_arguments, _called_by_name(function)))


def may_write_parameters(model: nn.Module) -> bool:
    """Whether a forward of the model may write into its parameters, for example clip a weight."""
    parts = list(model.modules())
    kinds: list[Any] = [type(part) for part in parts]
    return (
        any(getattr(part, "max_norm", None) is not None for part in parts)
        or any(map(_class_may_write_parameters, kinds))
        or any(map(_reaches_parameter_write, _held_functions(parts)))
    )


def _any_may_write(parts: list[nn.Module]) -> bool:
    """Whether code of one of the modules may write: of its class, its hooks, or a function that it holds."""
    kinds: list[Any] = list(map(type, parts))
    return (
        any(getattr(part, "inplace", False) is True for part in parts)
        or any(map(_class_may_write, kinds))
        or any(map(function_may_write, _held_functions(parts)))
    )


@lru_cache(maxsize=4096)
def _class_may_write(kind: Any) -> bool:
    return any(map(_may_write, _own_functions(kind))) or any(map(function_may_write, _run_by_forward(kind)))


@lru_cache(maxsize=4096)
def _class_may_write_parameters(kind: Any) -> bool:
    return any(map(_may_write_parameters, _own_functions(kind))) or any(
        map(_reaches_parameter_write, _run_by_forward(kind))
    )


@lru_cache(maxsize=4096)
def _reaches_parameter_write(function: FunctionType) -> bool:
    """Whether the function, or one that it calls by a name, may write into parameters."""
    helpers = _called_by_name(function)
    return _may_write_parameters(function) or any(_may_write_parameters(one, _arguments(one)) for one in helpers)


def _run_by_forward(kind: Any) -> list[FunctionType]:
    """The methods that `forward` runs, followed by name. Other methods do not count: they may initialize weights."""
    functions = _own_functions(kind)
    found = {function for function in functions if function.__name__ in ("forward", "__call__")}
    while True:
        names = set[str]().union(*(names_in(function.__code__) for function in found))
        more = {function for function in functions if function.__name__ in names} - found
        if not more:
            return list(found)
        found |= more


def _called_by_name(function: FunctionType) -> list[FunctionType]:
    """The user's functions that the function's code names (globals, closures), and those that they name in turn."""
    found: dict[int, FunctionType] = {}
    waiting = [function]
    while waiting and len(found) < MAX_FUNCTIONS:
        caller = waiting.pop()
        named_globals = (caller.__globals__.get(name) for name in names_in(caller.__code__))
        for value in (*named_globals, *closed_over(caller)):
            named = _function(value)
            if named is not None and id(named) not in found and named is not function:
                found[id(named)] = named
                waiting.append(named)
    return list(found.values())


def _function(value: Any) -> FunctionType | None:
    """The user's function that a value is, or whose method or partial application it is."""
    value = value.func if isinstance(value, functools.partial) else value
    value = getattr(value, "__func__", value) if isinstance(value, MethodType) else value
    return value if isinstance(value, FunctionType) and not is_foreign(value) else None


def _held_functions(parts: list[nn.Module]) -> list[FunctionType]:
    """The user's functions that the modules hold as attributes and hooks."""
    registries = (registry for part in parts for registry in (vars(part), part._forward_hooks, part._forward_pre_hooks))
    held = (_function(value) for registry in registries for value in registry.values())
    return [function for function in held if function is not None]


def _arguments(function: FunctionType) -> set[str]:
    code = function.__code__
    return set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])


def _own_functions(kind: Any) -> list[FunctionType]:
    own = (base for base in kind.__mro__ if base.__module__.partition(".")[0] not in ("torch", "sparsebit"))
    members = (member for base in own for member in vars(base).values())
    functions = (member.__func__ if isinstance(member, (staticmethod, classmethod)) else member for member in members)
    return [function for function in functions if isinstance(function, FunctionType)]


def _may_write(function: FunctionType) -> bool:
    tree = _tree_of(function)
    return tree is None or any(_is_write(node) for node in ast.walk(tree))


@lru_cache(maxsize=4096)
def _writes_into_arguments(function: FunctionType) -> bool:
    tree = _tree_of(function)
    own = _arguments(function)
    return tree is not None and any(_is_write(node) and _is_written_in(node, own) for node in ast.walk(tree))


def _may_write_parameters(function: FunctionType, own: set[str] | None = None) -> bool:
    """Whether the function's own code may write into parameters. `own`: arguments that may hold some (`self`)."""
    own, tree = set(function.__code__.co_varnames[:1]) if own is None else own, _tree_of(function)
    if tree is None:
        return True
    writes = [node for node in ast.walk(tree) if _is_write(node)]
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return bool(writes) and (not names.isdisjoint(_PARAMETERS) or any(_is_written_in(node, own) for node in writes))


def _tree_of(function: FunctionType) -> ast.AST | None:
    """The function's parsed source; None if it is not known. `__init__` counts as empty: no forward runs it."""
    if function.__name__ == "__init__":
        return ast.Module([], [])
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None


_PARAMETERS = frozenset({"data", "parameters", "named_parameters", "_parameters", "state_dict", "weight", "bias"})


def _is_written_in(node: Any, own: set[str]) -> bool:
    """Whether a write may reach something that an argument holds, judged by its statement alone."""
    if isinstance(node, ast.AugAssign):
        places: list[Any] = [node.target]
    elif isinstance(node, ast.Assign):
        places = [target for target in node.targets if _is_memory(target)]
    else:
        places = [node.func, *node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "out")]
    return any(isinstance(part, ast.Name) and part.id in own for place in places for part in ast.walk(place))


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
    if by_name or any(keyword.arg in ("out", "inplace") for keyword in node.keywords):
        return True
    place = _inplace_places().get(name, len(node.args))
    return any(not isinstance(flag, ast.Constant) or bool(flag.value) for flag in node.args[place : place + 1])


@cache
def _inplace_places() -> dict[str, int]:
    """The functions of torch.nn.functional that take `inplace`, and at which position."""
    functions = ((name, function) for name, function in vars(F).items() if isinstance(function, FunctionType))
    parameters = {name: list(inspect.signature(function).parameters) for name, function in functions}
    return {name: names.index("inplace") for name, names in parameters.items() if "inplace" in names}
