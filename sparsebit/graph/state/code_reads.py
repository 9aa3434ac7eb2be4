"""`CodeReads`: the names that code can read, from its bytecode and that of the functions that it calls by name.

Reads are not recorded while the code runs, because no hook sees the read of a global, of a variable around a function
or of a default argument. This errs on the side of too much: strings in the code may be names of attributes, and code
with `getattr` may read anything.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from sparsebit.graph.values.code import FOREIGN, MAX_FUNCTIONS, closed_over, function_of, is_foreign

# Plain values, which are compared at once.
PLAIN = (bool, int, float, complex, str, bytes, type(None), tuple, frozenset, torch.dtype, torch.device)
_DYNAMIC = frozenset({"getattr", "hasattr", "vars", "__dict__", "__getattribute__"})


@dataclass
class CodeReads:
    """The names that functions look up: attributes, strings that may name attributes, globals by namespace."""

    attributes: set[str] = field(default_factory=set)
    strings: set[str] = field(default_factory=set)
    globals: dict[tuple[int, str], tuple[dict[str, Any], str]] = field(default_factory=dict)
    cells: dict[int, tuple[types.CellType, str]] = field(default_factory=dict)
    classes: dict[type, None] = field(default_factory=dict)
    with_defaults: dict[types.FunctionType, None] = field(default_factory=dict)
    is_dynamic: bool = False  # whether the code may compute names of attributes (`getattr`): then it may read any

    def __len__(self) -> int:
        return len(self.attributes) + len(self.strings) + len(self.globals) + len(self.cells) + len(self.with_defaults)

    def may_read(self, name: object) -> bool:
        return self.is_dynamic or name in self.attributes or name in self.strings

    def update(self, other: CodeReads) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) | value)


def settings_of(kind: type) -> set[str]:
    """The attributes that the code of a class reads and sets only in `__init__`: its settings."""
    read, written = set[str](), set[str]()
    own = (item for base in kind.__mro__ if not is_foreign(base) for item in vars(base).items())
    for name, member in own:
        function = function_of(member)
        if function is not None and name != "__init__":
            read |= _looked_up(function.__code__)[0]
            steps = dis.get_instructions(function.__code__)
            written |= {str(step.argval) for step in steps if step.opname == "STORE_ATTR"}
    return read - written


def reads_of(kind: Any) -> CodeReads:
    return reads_of_functions(
        [member for base in kind.__mro__ if not is_foreign(base) for member in vars(base).values()]
    )


def reads_of_functions(members: Iterable[Any]) -> CodeReads:
    """The names that these functions look up, and those of the functions that they call by name."""
    found, waiting, seen = CodeReads(), list(members), set[int]()
    while waiting and len(seen) < MAX_FUNCTIONS:
        function = function_of(waiting.pop())
        if function is None or id(function) in seen or is_foreign(function):
            continue
        seen.add(id(function))
        waiting += closed_over(function)
        attributes, strings, names = _looked_up(function.__code__)
        found.attributes |= attributes
        found.strings |= strings
        found.is_dynamic |= not _DYNAMIC.isdisjoint(attributes | names)
        waiting += [function.__globals__.get(name) for name in names]
        if _is_installed(function.__module__):  # of an installed package only plain globals may be set by users
            plain = [name for name in names if isinstance(function.__globals__.get(name), PLAIN)]
            found.globals |= {(id(function.__globals__), name): (function.__globals__, name) for name in plain}
        else:
            waiting += _note_surroundings(function, attributes, names, found)
    return found


def _note_surroundings(
    function: types.FunctionType, attributes: frozenset[str], names: frozenset[str], found: CodeReads
) -> list[Any]:
    """Record cells, defaults and globals of a function. Returns the members of classes and modules that it names."""
    reached: list[Any] = []
    for cell, name in zip(function.__closure__ or (), function.__code__.co_freevars, strict=True):
        found.cells[id(cell)] = (cell, name)
    if function.__defaults__ or function.__kwdefaults__:
        found.with_defaults[function] = None
    for name in names:
        found.globals[id(function.__globals__), name] = (function.__globals__, name)
        value = function.__globals__.get(name)
        if isinstance(value, type) and not is_library(value.__module__) and value not in found.classes:
            found.classes[value] = None
            reached += vars(value).values()
        elif isinstance(value, types.ModuleType) and not is_library(value.__name__):
            for attribute in attributes & vars(value).keys():
                found.globals[id(vars(value)), attribute] = (vars(value), attribute)
                reached.append(vars(value)[attribute])
    return reached


def is_library(module: str) -> bool:
    return module.partition(".")[0] in FOREIGN or _is_installed(module)


@functools.lru_cache(maxsize=4096)
def _is_installed(module: str | None) -> bool:
    place = str(getattr(sys.modules.get(str(module)), "__file__", ""))
    return "site-packages" in place or "dist-packages" in place


@functools.lru_cache(maxsize=4096)
def _looked_up(code: types.CodeType) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """The names of attributes, strings and globals in the code, and in functions inside of it."""
    attributes, strings, names = set[str](), set[str](), set[str]()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(str(step.argval))
        elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names.add(str(step.argval))
    for constant in code.co_consts:
        if isinstance(constant, str) and constant.isidentifier():
            strings.add(constant)
        elif isinstance(constant, types.CodeType):
            for known, inner in zip((attributes, strings, names), _looked_up(constant), strict=True):
                known |= inner
    return frozenset(attributes), frozenset(strings), frozenset(names)
