"""Merges two records of one model: newly filled sections replace older ones, the rest is kept.

A record is about one model and one file of it. A newer record of another model or file is an error, because its numbers
would not belong to the older ones. The exception is a newer run that made that model or file itself: then the sections
about the former model or file are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, TypeVar

from sparsebit.errors import RecordError
from sparsebit.records.run_record import RunRecord

T = TypeVar("T")

_OF_FILE = ("file", "parity", "audits")


class Merged(NamedTuple):
    """The merged record, and the older sections that were dropped."""

    record: RunRecord
    dropped: tuple[str, ...]


def merged(old: RunRecord, new: RunRecord, source: str = "the record") -> Merged:
    """Merge both; a RecordError if they are of different models or files. `source`: the old one's name in messages."""
    made = {thing for run in new.runs for thing in run.made}
    check_same_architecture(old, new, source)
    if fault := _mismatch(old, new, made):
        raise RecordError(f"{source} is of {fault}; use another record file, or what this one was made for")
    if old.model is not None and new.model is not None and old.model.numbers != new.model.numbers:
        return Merged(new, old.sections)
    fresh = RunRecord()
    of_file = (*_OF_FILE, *(["accuracy"] if old.file is not None else []))  # it includes the score of the file
    kept = old.replace(**{name: getattr(fresh, name) for name in of_file}) if _is_other_file(old, new) else old
    dropped = tuple(name for name in old.sections if name not in kept.sections and name not in new.sections)
    lists = {
        "errors": _joined(kept.errors, new.errors, lambda profile: profile.sync),
        "parity": _joined(kept.parity, new.parity, lambda check: (check.parity.runtime, check.parity.against)),
        "audits": _joined(  # one with timings replaces one without
            sorted((*kept.audits, *new.audits), key=lambda audit: bool(audit.latency)),
            (),
            lambda audit: (audit.runtime, audit.num_threads),
        ),
        "runs": (*old.runs, *new.runs),
    }
    filled = {name: getattr(new, name) for name in new.sections if name not in lists}
    if kept.file is not None and new.file is not None and "file" not in made:
        filled["file"] = kept.file  # has more facts than a verb that only read the file
    return Merged(kept.replace(**filled, **lists), dropped)


def _is_other_file(old: RunRecord, new: RunRecord) -> bool:
    return new.file is not None and (old.file is None or old.file.sha256 != new.file.sha256)


def _mismatch(old: RunRecord, new: RunRecord, made: Collection[str]) -> str:
    """The model or file of the old record, if the new record is not about it; empty if they belong together."""
    if old.model is not None and new.model is not None and old.model.numbers != new.model.numbers:
        what = f"another quantized {old.model.module_type} ({old.model.name})"
        return "" if "model" in made else f"{what}: its config, weights or scales differ from those of this model"
    if new.file is not None and _is_other_file(old, new):
        if old.file is not None and "file" not in made:
            return f"another file ({old.file.path}), or {new.file.path} has changed since"
        if old.file is None and old.model is not None and new.model is None:
            return f"a model without a file, and nothing shows that {new.file.path} is a file of it"
    is_replaced = new.file is None or _is_other_file(old, new)
    if old.model is None and new.model is not None and old.file is not None and is_replaced:
        return f"the file {old.file.path} alone, and nothing shows that it is a file of {new.model.name}"
    return ""


def check_same_architecture(old: RunRecord, new: RunRecord, source: str) -> None:
    """Raise for two different models; unlike the numbers, the architecture is known before any work."""
    if old.model is not None and new.model is not None and old.model.architecture != new.model.architecture:
        one, other = (f"{m.name}, a {m.module_type} of {m.num_parameters:,} parameters" for m in (old.model, new.model))
        raise RecordError(f"{source} is of another model ({one}; this one is {other}); use another record file")


def _joined(old: Iterable[T], new: Iterable[T], key: Callable[[T], Any]) -> tuple[T, ...]:
    """All of them; for each key, only the last."""
    return tuple({key(item): item for item in (*old, *new)}.values())
