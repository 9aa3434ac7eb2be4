"""Reads JSON files that a run left, with errors that say what to give instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparsebit.errors import RecordError

ALLOWED = (
    "the folder of `sparsebit compress`, a record (--record FILE), a pruned model's folder, "
    "or the folder of a quantized language model"
)


def read_json(file: Path) -> dict[str, Any]:
    """An object from a file; a RecordError for anything else."""
    try:
        values = json.loads(read_text(file))
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{file} is damaged: {str(error) or 'nested too deeply'}; make the folder again") from None
    if not isinstance(values, dict):
        raise RecordError(
            f"{file} is damaged: it holds a {type(values).__name__}, not an object; make the folder again"
        )
    return values


def read_text(file: Path) -> str:
    """The text of a file; a RecordError for anything else."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecordError(f"{file} is damaged, or not a text file: {error}; give {ALLOWED}") from None
    except OSError as error:
        raise RecordError(f"{file} cannot be read: {error.strerror}") from None
