"""`fingerprint`: a text that differs for metrics of different code, to recognise the metric of an earlier call."""

from __future__ import annotations

import functools
import inspect
import types
from dataclasses import fields, is_dataclass
from typing import Any


def fingerprint(metric: Any) -> str:
    """The code of a metric, with its defaults and the functions and plain values that it closes over.

    Functions that it finds by their global names, and data, are not looked at.
    """
    return _text(metric, set())


def _text(value: Any, seen: set[int]) -> str:
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if id(value) in seen:  # a function that closes over itself
        return "..."
    if isinstance(value, tuple | frozenset):
        texts = [_text(one, seen) for one in value]
        return f"({', '.join(texts if isinstance(value, tuple) else sorted(texts))})"
    return f"{type(value).__qualname__}{[_text(part, {*seen, id(value)}) for part in _parts(value)]}"


def _parts(value: Any) -> list[Any]:
    """The parts that decide what a function, or the call of an object, computes; none for other objects."""
    if isinstance(value, types.CodeType):
        return [value.co_code, value.co_names, value.co_consts]
    if inspect.isfunction(value):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        return [value.__code__, value.__defaults__, tuple(sorted((value.__kwdefaults__ or {}).items())), *cells]
    if inspect.ismethod(value):
        return [value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, tuple(sorted(value.keywords.items()))]
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    own = inspect.getattr_static(type(value), "__call__", None)
    return [own] if inspect.isfunction(own) else []
