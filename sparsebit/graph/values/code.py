"""The names in the code of Python functions, and the functions that it reaches, found without running it."""

from __future__ import annotations

import contextlib
import dis
import sys
import types
from typing import Any

MAX_FUNCTIONS = 300  # the most functions that are followed from one to the next
FOREIGN = {"torch", "sparsebit", "numpy", *sys.stdlib_module_names} - {"__main__"}

_NEVER_SEEDED = {"urandom", "SystemRandom", "randbits", "randbelow", "token_bytes", "token_hex", "uuid1", "uuid4"}
_SEEDED_BY_ARGUMENT = {"default_rng", "RandomState", "SeedSequence", "Random", "PCG64", "MT19937", "Philox", "SFC64"}


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


def draws_unseeded(code: types.CodeType) -> str | None:
    """The name of a source of other numbers at every call, of the system or a generator without a seed, that is used.

    It is found by name, in Python's, NumPy's and the user's code alike; `default_rng(7)` has a seed.
    """
    if found := sorted(_NEVER_SEEDED.intersection(code.co_names)):
        return found[0]
    inner = (draws_unseeded(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    if (source := next(filter(None, inner), None)) or _SEEDED_BY_ARGUMENT.isdisjoint(code.co_names):
        return source
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("PRECALL", "PUSH_NULL")]
    for name, first, second in zip(steps, steps[1:], steps[2:], strict=False):
        if name.argval in _SEEDED_BY_ARGUMENT and name.opname.startswith("LOAD_"):
            given_none = first.opname == "LOAD_CONST" and first.argval is None and second.opname.startswith("CALL")
            if given_none or (first.opname == "CALL" and first.arg == 0):
                return str(name.argval)
    return None


def closed_over(function: types.FunctionType) -> list[Any]:
    """The values of the variables around the function; those that have none yet are left out."""
    found = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not filled yet
            found.append(cell.cell_contents)
    return found
