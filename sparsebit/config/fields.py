"""Descriptions of config keys: allowed values, all keys of a model, and the key nearest to a misspelt one.

Everything is read from pydantic's fields and their `Annotated` marks, so that errors, the generated reference and the
CLI describe a key in the same words. `OneOf` marks a text that must be one of some names, `Allowed` describes the
values of a key whose type does not say enough.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from sparsebit.config.targets import is_for
from sparsebit.registry import Registry

Model = type[BaseModel]
Names = tuple[str, ...]


@dataclass(frozen=True)
class OneOf:
    """Marks a text that must be one of some names; `canonical` normalizes a name or raises."""

    names: Callable[[], Iterable[str]]
    canonical: Callable[[str], str]

    @classmethod
    def fixed(cls, *names: str, canonical: Callable[[str], str] = str.lower) -> OneOf:
        def checked(value: str) -> str:
            if canonical(value) not in names:
                raise ValueError(f"not one of {', '.join(names)}")
            return canonical(value)

        return cls(lambda: names, checked)

    @classmethod
    def registered(cls, registry: Registry[object], target: str = "") -> OneOf:
        """The names that are registered at the time of the check, not at the time of the import.

        `target`: only names whose class is made for it (`TARGETS`) are listed; the rules check the others.
        """
        return cls(lambda: registered_for(registry, target), registry.canonical)

    def __call__(self, value: object) -> object:
        return self.canonical(value) if isinstance(value, str) else value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self, handler(source))


def registered_for(registry: Registry[object], target: str = "") -> list[str]:
    """The registered names whose class is made for a target: those in its TARGETS; without TARGETS, all."""
    return [name for name in registry if is_for(registry.get(name), target)]


@dataclass(frozen=True)
class Allowed:
    """Marks a field with a description of its allowed values, if its type does not show them."""

    text: str


def describe(field: FieldInfo) -> str:
    """The allowed values of a key, as error messages and the generated reference write them."""
    for mark in field.metadata:
        if isinstance(mark, Allowed):
            return mark.text
        if isinstance(mark, OneOf):
            return ", ".join(mark.names())
    if model := section_of(field):
        return f"a mapping of {', '.join(model.model_fields)}"
    return ", ".join([_words(field.annotation), *_bounds(field.metadata)])


def _words(kind: Any) -> str:
    """A type as it is written in YAML."""
    plain = {bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: "null"}
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return ", ".join([_words(parts[0]), *_bounds(parts[1:])])
    if origin is Literal:
        return ", ".join(map(str, parts))
    if origin in (Union, UnionType):
        return " or ".join(map(_words, parts))
    if origin is tuple:
        return f"a list, each {_words(parts[0])}" if parts[1:] == (...,) else f"a list of {len(parts)}"
    return plain.get(kind) or str(getattr(kind, "__name__", kind))


# By the attributes of annotated_types' marks (`Ge.ge`) and of pydantic's `pattern`.
_BOUNDS = {
    "ge": "at least {}",
    "gt": "above {}",
    "le": "at most {}",
    "lt": "below {}",
    "multiple_of": "a multiple of {}",
    "min_length": "of length {} or more",
    "max_length": "of length {} or less",
    "pattern": "that matches {}",
}


def _bounds(marks: Iterable[Any]) -> Iterator[str]:
    for mark in marks:
        if isinstance(mark, FieldInfo):
            yield from _bounds(mark.metadata)
        for name, text in _BOUNDS.items():
            if (bound := getattr(mark, name, None)) is not None:
                yield text.format(bound)


def choices(field: FieldInfo) -> list[str]:
    """The names a text may be; empty if it is not restricted to names."""
    names = [name for mark in field.metadata if isinstance(mark, OneOf) for name in mark.names()]
    literal = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    return [*names, *(name for name in literal if isinstance(name, str))]


def section_of(field: FieldInfo) -> Model | None:
    """The model of a key that holds further keys."""
    kind = field.annotation
    return complete(kind) if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def complete(model: Model) -> Model:
    """The model with all its keys, as some depend on the registered classes."""
    found: Model = model.complete() if hasattr(model, "complete") else model
    return found


def walk(model: Model, prefix: Names = ()) -> Iterator[tuple[Names, FieldInfo]]:
    """Every key of a model with its path, sections included, in the order of the schema."""
    for name, field in complete(model).model_fields.items():
        yield (*prefix, name), field
        if inner := section_of(field):
            yield from walk(inner, (*prefix, name))


def field_at(model: Model, path: Names) -> FieldInfo | None:
    """The field under a key path, if there is one."""
    field: FieldInfo | None = None
    section: Model | None = complete(model)
    for name in path:
        field = section.model_fields.get(name) if section else None
        section = section_of(field) if field else None
    return field


def meant(model: Model, path: Names) -> Names | None:
    """The existing key path nearest to one that does not exist: a neighbour of similar name, or that name elsewhere."""
    section = complete(model) if len(path) == 1 else section_of(field_at(model, path[:-1]) or FieldInfo())
    leaf = path[-1].upper()
    if section and (close := nearest(leaf, section.model_fields)):
        return (*path[:-1], close)
    paths = [found for found, _ in walk(model)]
    same_leaf = [found for found in paths if found[-1] == leaf.split(".")[-1]]
    # If several match (W.QUANTIZER.BIT, A.QUANTIZER.BIT), the one in the section where the user wrote it.
    return max(same_leaf, key=lambda found: sum(found[:n] == path[:n] for n in range(1, len(path) + 1)), default=None)


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The name that begins like `name`, else the one that looks most like it, whatever its case."""
    folded = {known.lower(): known for known in names}
    if begins := [known for known in folded if len(name) > 2 and known.startswith(name.lower())]:
        return folded[begins[0]]
    close = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.5)
    return folded[close[0]] if close else None
