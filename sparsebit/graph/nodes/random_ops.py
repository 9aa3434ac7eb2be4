"""Which functions and modules may draw random numbers, by torch's own schemas, and which read the memory layout.

Drawing is a side effect even if its result is not read, because it changes the random numbers that follow. So dead code
that draws must not be removed, and code whose draws depend on the memory layout must get the original's layout.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any

import torch
from torch import nn

from sparsebit.graph.values.code import closed_over, names_in

_LAYOUT = frozenset(("is_contiguous", "stride", "as_strided"))


def may_draw(function: Any) -> bool:
    """Whether a call of a function, or of a tensor's method (by name), may draw random numbers."""
    name = str(getattr(function, "__name__", function))
    return name in _drawing() or (isinstance(function, types.FunctionType) and _reaches(function, _drawing()))


def module_may_draw(module: nn.Module) -> bool:
    """Whether a forward of a module of torch.nn may draw random numbers, in train mode or in eval mode."""
    kinds: list[Any] = [type(part) for part in module.modules()]
    return any(may_draw(_forward_of(kind)) for kind in kinds)


@lru_cache(maxsize=4096)
def class_may_draw(kind: Any) -> bool:
    """Whether code of a module's class, except for what initializes weights, may draw random numbers."""
    return may_draw(_forward_of(kind)) or any(map(may_draw, _own_functions(kind)))


@lru_cache(maxsize=4096)
def class_reads_layout(kind: Any) -> bool:
    """Whether code of a module's class may read a tensor's memory layout (`x.is_contiguous()`)."""
    return any(_reaches(function, _LAYOUT) for function in _own_functions(kind))


def _own_functions(kind: Any) -> Iterator[types.FunctionType]:
    """The methods that a class has from outside torch, except those that initialize weights."""
    own = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in ("torch", "builtins")]
    for name, member in ((name, member) for base in own for name, member in vars(base).items()):
        if isinstance(member, types.FunctionType) and "init" not in name and "reset" not in name:
            yield member


def _forward_of(kind: Any) -> Any:
    """The class's forward; None for a compiled module, whose code is not known."""
    return None if issubclass(kind, torch.jit.ScriptModule) else kind.forward


@cache
def _drawing() -> frozenset[str]:
    """The names of all ops that torch tags as using a random generator."""
    ops = (schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("aten::"))
    tagged = ((op.name, torch._C._get_operation_overload(op.name, op.overload_name)) for op in ops)
    seeded = torch.Tag.nondeterministic_seeded
    return frozenset(name.removeprefix("aten::") for name, found in tagged if found is not None and seeded in found[2])


@lru_cache(maxsize=4096)
def _reaches(function: types.FunctionType, ops: frozenset[str]) -> bool:
    """Whether the function's code, or code that it calls by name, names one of these ops."""
    waiting, seen = [function], {function}
    for one in waiting:
        if not ops.isdisjoint(names_in(one.__code__)):
            return True
        more = set(_called(one)) - seen
        seen |= more
        waiting += more
    return False


def _called(function: types.FunctionType) -> Iterator[types.FunctionType]:
    """The functions that the code can reach by name (`f(x)`, `F.f(x)`) or closes over."""
    names = names_in(function.__code__)
    reached = [function.__globals__[name] for name in names & function.__globals__.keys()]
    modules = [vars(value) for value in reached if isinstance(value, types.ModuleType)]
    reached += [module[name] for module in modules for name in names & module.keys()]
    reached += closed_over(function)
    yield from (value for value in reached if isinstance(value, types.FunctionType))
