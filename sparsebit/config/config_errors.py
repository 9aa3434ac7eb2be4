"""Finds and describes errors in a config: all of them in one ConfigError, each with its file and line.

pydantic validates the models; `faults_of` translates its errors into `Fault` values, validators of our own raise
`Faults`, and `error` joins them in the order of the file. `all_faults` removes wrong keys and validates again, because
pydantic checks rules between keys only once every single key is right. So a user sees all faults of a file at once,
each with the key as written, the allowed values, and the nearest existing name.
"""

from __future__ import annotations

import copy
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from sparsebit.config.fields import Model, Names, choices, complete, describe, field_at, meant, nearest, section_of
from sparsebit.config.reading import Document
from sparsebit.errors import ConfigError, printable

MISSING = "missing; "  # start of the reason if a required key is missing


@dataclass(frozen=True)
class Fault:
    """`W.QUANTIZER.BIT=17 at layer1.*: reason`. `place` is the key path whose line in the file is shown."""

    key: Names
    reason: str
    given: str = ""
    site: str = ""
    place: Names = ()

    def __str__(self) -> str:
        site = f" at {printable(self.site, keep='')}" if self.site else ""
        key = printable(".".join(self.key), keep="")
        return f"{key}{self.given}{site}: {self.reason}" if key else self.reason

    def at(self, site: str) -> Fault:
        """The same fault, found in the `SPECIFIC` entry of that glob."""
        return replace(self, site=site, place=(self.key[0], "SPECIFIC", site))


class Faults(ValueError):
    """Carries faults out of a pydantic validator; users see the ConfigError that `error` makes from it."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = list(dict.fromkeys(faults))
        super().__init__("; ".join(map(str, self.faults)))


def error(faults: Iterable[Fault], document: Document | None = None) -> ConfigError:
    """One ConfigError for all of them, in the order of the file."""
    document = Document({}) if document is None else document
    located = [(document.line_of(fault.place or fault.key) or 0, fault) for fault in dict.fromkeys(faults)]
    located.sort(key=lambda pair: pair[0])
    sentences = [f"line {line}: {fault}" if line else str(fault) for line, fault in located]
    if len(sentences) > 1:
        return ConfigError("\n  ".join([f"{len(sentences)} faults in {document.origin or 'the config'}:", *sentences]))
    return ConfigError(f"{document.origin}, {sentences[0]}" if document.origin else sentences[0])


def faults_of(invalid: ValidationError, model: Model, prefix: Names = ()) -> list[Fault]:
    """Pydantic's errors about `model`, whose key path is `prefix`, as faults."""
    faults: list[Fault] = []
    for entry in invalid.errors(include_url=False):
        cause = entry.get("ctx", {}).get("error")
        if isinstance(cause, Faults):  # those without a key are about the key of the validator
            faults.extend(
                fault if fault.key else replace(fault, key=(*prefix, *_path(entry))) for fault in cause.faults
            )
        elif entry["type"] == "extra_forbidden":
            faults.append(unknown_key(model, _path(entry), entry["input"], prefix))
        else:
            fault = _wrong_value(model, entry, cause, prefix)
            # For a key of several types, pydantic reports an error for each of them, below the key.
            is_of_a_type = len(fault.key) < len(prefix) + len(_path(entry))
            if not is_of_a_type or all(fault.key != other.key for other in faults):
                faults.append(fault)
    return faults


def all_faults(values: Mapping[str, Any], model: Model) -> list[Fault]:
    """The faults of single keys, then those between keys: wrong keys are removed before rules are checked.

    Rules that are broken only because a key was removed are not reported.
    """
    remaining, faults = copy.deepcopy(dict(values)), []
    removed: set[Names] = set()
    while True:
        try:
            model.model_validate(remaining)
        except ValidationError as invalid:
            found = faults_of(invalid, model)
            faults += [fault for fault in found if not _follows_from(fault, removed)]
            wrong = {_path(entry) for entry in invalid.errors(include_url=False, include_context=False)}
            taken = {path for path in wrong if path and _take_out(remaining, path)}
            removed |= taken
            if taken:
                continue
        return faults


def _follows_from(fault: Fault, removed: set[Names]) -> bool:
    """Whether a key is wrong because one was removed: itself, a section around it, or a misspelt neighbour."""
    is_missing = fault.reason.startswith(MISSING)
    return any(fault.key[: len(path)] == path or (is_missing and fault.key[:-1] == path[:-1]) for path in removed)


def _take_out(values: dict[str, Any], path: Names) -> bool:
    """Remove a key of nested values, or the nearest enclosing section that exists."""
    section: Any = values
    for name in path[:-1]:
        if not isinstance(section.get(name), dict):
            return section.pop(name, values) is not values
        section = section[name]
    return section.pop(path[-1], values) is not values


def unknown_key(model: Model, path: Names, value: object = ..., prefix: Names = ()) -> Fault:
    """The fault of a key that is in no schema."""
    known = next(n for n in range(len(path)) if field_at(model, path[: n + 1]) is None)
    parent = field_at(model, path[:known])
    section = section_of(parent) if parent else model
    if parent and not section:
        reason = f"unknown key; {'.'.join((*prefix, *path[:known]))} holds no keys, it takes {describe(parent)}"
    else:
        assert section is not None
        reason = f"unknown key; allowed here: {', '.join(complete(section).model_fields)}"
        if field_at(model, tuple(path[-1].split("."))) and "." in path[-1]:
            steps = path[-1].split(".")
            reason += f"; keys nest, write {': {'.join(steps)}: ...{'}' * (len(steps) - 1)}"
        elif near := meant(model, path[: known + 1]):
            whole = (*near, *path[known + 1 :])
            reason += f"; did you mean {'.'.join((*prefix, *(whole if field_at(model, whole) else near)))}?"
    return Fault((*prefix, *path), reason, "" if value is ... else given(value))


def _wrong_value(model: Model, entry: ErrorDetails, cause: object, prefix: Names) -> Fault:
    path, value = _path(entry), entry["input"]
    while path and field_at(model, path) is None:  # for a key with several types, pydantic appends the type
        path = path[:-1]
    field = field_at(model, path)
    if field is None:  # a rule between the keys of the model itself
        return Fault(prefix, str(cause or entry["msg"]))
    names = choices(field)
    if isinstance(cause, ConfigError) and not names:
        return Fault((*prefix, *path), str(cause))
    reason = f"allowed: {describe(field)}"
    if value is None:
        reason += "; no value after the colon: write a value, or take the key out"
    elif isinstance(value, str) and (near := nearest(value, names)):
        reason += f"; did you mean {near}?"
    elif isinstance(value, str) and field.annotation in (int, float, bool) and _NUMBER.fullmatch(value.strip()):
        reason += "; it was given as text: take the quotes off"
    elif cause is not None and not names:  # the message of a section's validator
        reason += f"; {cause}"
    return Fault((*prefix, *path), reason, given(value))


def _path(entry: ErrorDetails) -> Names:
    # Positions in lists (a wrong item of SKIP_TRACE_MODULES) are dropped: the fault names the key.
    return tuple(part for part in entry["loc"] if isinstance(part, str))


_NUMBER = re.compile(r"true|false|yes|no|on|off|[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist, _SHORT.maxstring, _SHORT.maxlong = 2, 3, 3, 60, 40


def given(value: object) -> str:
    """`=4`, `='x'`: the value as the user gave it, shortened if it is long."""
    try:
        return f"={_SHORT.repr(list(value) if isinstance(value, tuple) else value)}"
    except ValueError:  # an integer of more digits than Python is willing to print
        return f"=<{type(value).__name__}>"
