"""The names in the code of Python functions, and the functions that it reaches, found without running it."""

from __future__ import annotations

import contextlib
import sys
import types
from typing import Any

MAX_FUNCTIONS = 300  # the most functions that are followed from one to the next
FOREIGN = {"torch", "sparsebit", "numpy", *sys.stdlib_module_names} - {"__main__"}


def is_foreign(thing: Any) -> bool:
    """Whether it belongs to torch, NumPy, Sparsebit or Python itself."""
    return str(getattr(thing, "__module__", None)).partition(".")[0] in FOREIGN


def function_of(member: Any) -> types.FunctionType | None:
    """The function of a property, a method or a function; None for anything else."""
    if isinstance(member, property):
        member = member.fget
    member = getattr(member, "__func__", member)  # a method, a class method, a static method
    return member if isinstance(member, types.FunctionType) else None


def names_in(code: types.CodeType) -> set[str]:
    """Every name that is looked up, globals among them, also in functions inside."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(names_in, inner))


def closed_over(function: types.FunctionType) -> list[Any]:
    """The values of the variables around the function; those that have none yet are left out."""
    found = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not filled yet
            found.append(cell.cell_contents)
    return found
