"""Records on disk: read strictly, written whole or not at all, extended rather than replaced."""

from __future__ import annotations

import os
from pathlib import Path

from sparsebit.errors import RecordError
from sparsebit.folders import locked, replace_text, unwritable
from sparsebit.records.merging import Merged, merged
from sparsebit.records.run_record import RunRecord


def read_record(path: str | os.PathLike[str]) -> RunRecord:
    """The record in a file; a RecordError if there is none, or one that this Sparsebit cannot read."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecordError(f"{path} is damaged: {error}") from None
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None
    return RunRecord.from_json(text, str(path))


def write_record(path: str | os.PathLike[str], record: RunRecord) -> None:
    """Write the record to a file; an older file is replaced when the new one is complete."""
    replace_text(checked_record_path(path), record.to_json())


def extend_record(path: str | os.PathLike[str], record: RunRecord) -> Merged:
    """Add to the record in the file, if there is one: newly filled sections replace older ones, the others stay.

    A file with a record of another model, or with anything else, is not changed and raises a RecordError. Several
    processes may extend one file: each reads what the other has written.
    """
    target = checked_record_path(path)
    with locked(target.parent):
        result = merged(read_record(target), record, str(path)) if target.exists() else Merged(record, ())
        replace_text(target, result.record.to_json())
    return result


def checked_record_path(path: str | os.PathLike[str]) -> Path:
    """The true path, if a record can be written there; for use before any work is done."""
    target = Path(path).expanduser()
    if fault := unwritable(target, "record.json"):
        raise RecordError(fault)
    return target.resolve()
