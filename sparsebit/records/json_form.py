"""Converts frozen dataclasses to plain JSON values and back, by their type hints, without loss.

JSON has no infinities and no NaN: a field of type float holds them as the strings `Infinity`, `-Infinity` and `NaN`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union

from sparsebit.errors import RecordError

T = TypeVar("T")

_NOT_FINITE = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def to_plain(value: Any, hint: Any, path: str = "record") -> Any:
    """The value in JSON form."""
    if value is None:
        return None
    if _is_record(hint):
        known = field_types(hint).items()
        return {name: to_plain(getattr(value, name), inner, f"{path}.{name}") for name, inner in known}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return to_plain(value, _not_none(hint), path)
    if origin is tuple:
        return [to_plain(item, inner, path) for item, inner in zip(value, _items(arguments, len(value)), strict=True)]
    if origin is dict:
        return {str(key): to_plain(item, arguments[1], f"{path}.{key}") for key, item in value.items()}
    if hint is float:
        number = float(value)
        return number if math.isfinite(number) else {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(number)]
    return _checked_plain(value, path) if hint is Any else value


def from_plain(hint: type[T], value: Any, path: str) -> T:
    """The value that `to_plain` converted to this; anything else is a RecordError that names the place."""
    return typing.cast("T", _read(hint, value, path))


def filled(kind: type[T], values: Mapping[str, Any], path: str, source: str) -> T:
    """As `from_plain`, of values with their format and version. `source`: their name in messages."""
    given = {key: value for key, value in values.items() if key not in ("format", "version")}
    try:
        return from_plain(kind, given, path)
    except RecordError as error:
        raise RecordError(f"{source} is damaged or was written by another program: {error}") from None


@functools.cache
def field_types(kind: Any) -> Mapping[str, Any]:
    """The fields of a dataclass with their types."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _read(hint: Any, value: Any, path: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return None if value is None else _read(_not_none(hint), value, path)
    if _is_record(hint):
        return _read_fields(hint, value, path)
    if origin is tuple:
        if not isinstance(value, list) or (arguments[-1] is not Ellipsis and len(value) != len(arguments)):
            raise _wrong(path, value, "a list" if arguments[-1] is Ellipsis else f"a list of {len(arguments)}")
        inner = _items(arguments, len(value))
        return tuple(_read(kind, item, f"{path}[{i}]") for i, (kind, item) in enumerate(zip(inner, value, strict=True)))
    if origin is dict:
        if not isinstance(value, dict):
            raise _wrong(path, value, "an object")
        return {key: _read(arguments[1], item, f"{path}.{key}") for key, item in value.items()}
    if origin is Literal:
        if value not in arguments or not isinstance(value, str):
            raise _wrong(path, value, " or ".join(map(repr, arguments)))
        return value
    return value if hint is Any else _read_scalar(hint, value, path)


def _read_fields(kind: Any, value: Any, path: str) -> Any:
    if not isinstance(value, dict):
        raise _wrong(path, value, "an object")
    known = field_types(kind)
    if unknown := [key for key in value if key not in known]:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
        raise RecordError(f"{path}.{unknown[0]}: unknown key; {hint}")
    for field in dataclasses.fields(kind):
        if field.name not in value and field.default is field.default_factory is dataclasses.MISSING:
            raise RecordError(f"{path}.{field.name} is missing")
    return kind(**{key: _read(known[key], item, f"{path}.{key}") for key, item in value.items()})


def _read_scalar(hint: Any, value: Any, path: str) -> Any:
    if hint is float:
        if isinstance(value, str) and value in _NOT_FINITE:
            return _NOT_FINITE[value]
        with contextlib.suppress(OverflowError):
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                return float(value)
        raise _wrong(path, value, "a number")
    if isinstance(value, bool) != (hint is bool) or not isinstance(value, hint):
        raise _wrong(path, value, {str: "a text", int: "a whole number", bool: "true or false"}[hint])
    return value


def _is_record(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint)


def _not_none(hint: Any) -> Any:
    """The one type of `X | None`."""
    (kind,) = (argument for argument in typing.get_args(hint) if argument is not type(None))
    return kind


def _items(arguments: tuple[Any, ...], length: int) -> tuple[Any, ...]:
    """The type of each item of a tuple."""
    return (arguments[0],) * length if arguments[-1] is Ellipsis else arguments


def _checked_plain(value: Any, path: str) -> Any:
    """A value without a type hint (a config) in JSON form; raises if JSON would not restore it."""
    if isinstance(value, Mapping):
        return {str(key): _checked_plain(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_checked_plain(item, path) for item in value]
    is_finite = not isinstance(value, float) or math.isfinite(value)
    if is_finite and (value is None or isinstance(value, (str, int, float))):
        return value
    shown = f"a {type(value).__name__}" if is_finite else value
    raise RecordError(f"{path}: {shown} cannot be written to JSON; allowed: texts and finite numbers")


def _wrong(path: str, value: Any, allowed: str) -> RecordError:
    shown = repr(value)
    return RecordError(f"{path}: {shown if len(shown) <= 40 else shown[:37] + '...'} is not {allowed}")
