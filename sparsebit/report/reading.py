"""Reads a run from what is on disk: the folder of a search, a record, a pruned model, a packed language model."""

from __future__ import annotations

import json
import os
from pathlib import Path

from sparsebit.errors import RecordError
from sparsebit.records.ladder import FORMAT as LADDER_FORMAT
from sparsebit.records.ladder import Ladder
from sparsebit.records.run_record import FORMAT as RECORD_FORMAT
from sparsebit.records.run_record import RunRecord
from sparsebit.report.json_files import ALLOWED, read_json, read_text
from sparsebit.report.page_data import Run
from sparsebit.report.read_ladder import LADDER, RECORD, run_of_folder, run_of_ladder
from sparsebit.report.read_language_model import CONFIG, is_packed, run_of_language_model
from sparsebit.report.read_pruned import CHANNELS, run_of_pruned
from sparsebit.report.read_record import run_of_record


def read_run(path: str | os.PathLike[str]) -> Run:
    """The run of a folder or of a record file; a RecordError names what is wrong and what is allowed."""
    place = Path(path).expanduser()
    if not place.exists():
        raise RecordError(f"{path} does not exist; give {ALLOWED}")
    try:
        return _run_of(place)
    except RecordError:
        raise
    # A damaged file may still have the right form, with values that no run writes: a negative count, a missing step.
    except (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError) as error:
        fault = f"{type(error).__name__}: {error}".rstrip(": ")
        raise RecordError(f"{path} is damaged: its values do not fit together ({fault}); give {ALLOWED}") from error


def _run_of(place: Path) -> Run:
    if not place.is_dir():
        return _run_of_file(place)
    if (place / LADDER).exists():
        return run_of_folder(place, Ladder.from_json(read_text(place / LADDER), str(place / LADDER)))
    if (place / RECORD).exists():
        return _run_of_file(place / RECORD, place.resolve().name)
    if (place / CHANNELS).exists():
        return run_of_pruned(place, read_json(place / CHANNELS))
    if (place / CONFIG).exists():
        if is_packed(place):
            return run_of_language_model(place)
        raise RecordError(f"{place / CONFIG} has no quantization_config of a packed model; give {ALLOWED}")
    names = ", ".join(sorted(entry.name for entry in place.iterdir())[:4])
    raise RecordError(f"{place} holds {names or 'nothing'}, and no record; give {ALLOWED}")


def _run_of_file(file: Path, name: str = "") -> Run:
    text = read_text(file)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{file} is damaged: {str(error) or 'nested too deeply'}; give {ALLOWED}") from None
    kind = values.get("format") if isinstance(values, dict) else None
    if kind == LADDER_FORMAT:
        return run_of_ladder(Ladder.from_json(text, str(file)), name or file.resolve().parent.name)
    if kind != RECORD_FORMAT:
        raise RecordError(f"{file} is not a record of Sparsebit; give {ALLOWED}")
    return run_of_record(RunRecord.from_json(text, str(file)), name or file.stem)
