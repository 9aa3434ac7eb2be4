"""Splits the data: samples that calibrate, samples that select among candidates, samples for the final judgement."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sparsebit.errors import CalibrationError
from sparsebit.execution.batches import batches_of, rows_of, to_device

_PIECE = 64  # samples; a judge decides after whole pieces
_FEWEST = 4  # pieces: two to calibrate, one to select, one for the final judgement


@dataclass(frozen=True)
class Samples:
    """Three lists of batches without common samples."""

    calibration: list[Any]
    selection: list[Any]
    final: list[Any]


def split(data: Any, validation: Any, *, needs_samples: bool) -> Samples:
    """The parts of the data.

    Without `validation` the first half of `data` calibrates, the rest judges. `needs_samples`: False for a metric with
    data of its own, for which all of `data` calibrates.
    """
    calibration = _listed(data, "data")
    if not needs_samples:
        return Samples(calibration, [], [])
    if validation is not None:
        judging = _enough(_listed(validation, "validation"), 2, "validation")
    else:
        parts = _enough(calibration, _FEWEST, "data")
        half = math.ceil(len(parts) / 2)
        calibration, judging = parts[:half], parts[half:]
    # Pieces alternate, so that both parts cover data that is sorted.
    return Samples(calibration, judging[0::2], judging[1::2])


def _listed(data: Any, name: str) -> list[Any]:
    found = [to_device(batch, "cpu") for batch in batches_of(data)]
    if not found:
        raise CalibrationError(f"{name} holds no batches; give a few hundred samples that look like those in use")
    return found


def pieces_of(batches: Sequence[Any], size: int) -> list[Any]:
    """The batches in pieces of at most `size` samples; a batch that cannot be split is one piece."""
    rows = [_rows(batch) for batch in batches]
    return [piece for batch, count in zip(batches, rows, strict=True) for piece in _pieces(batch, count, size)]


def _enough(batches: list[Any], fewest: int, name: str) -> list[Any]:
    """The batches in pieces of at most 64 samples, at least `fewest` of them."""
    rows = [_rows(batch) for batch in batches]
    size = _PIECE if all(rows) and sum(rows) >= fewest * _PIECE else max(1, sum(rows) // fewest)
    pieces = pieces_of(batches, size)
    if len(pieces) < fewest:
        raise CalibrationError(
            f"{name} holds {len(pieces)} batches that cannot be split, and {fewest} are needed, because candidates are "
            "selected and finally judged on different samples; give more and smaller batches"
        )
    return pieces


def _pieces(batch: Any, count: int, size: int) -> Iterator[Any]:
    if count <= size:
        yield batch
        return
    for start in range(0, count, size):
        yield rows_of(batch, count, start, min(size, count - start))


def _rows(batch: Any) -> int:
    """The number of samples, if all the batch holds is tensors with a row for each; else 0."""
    if isinstance(batch, Tensor):
        values: Iterable[Any] = [batch]
    else:
        values = batch.values() if isinstance(batch, Mapping) else batch
    sizes = {len(value) if isinstance(value, Tensor) and value.dim() else 0 for value in values}
    return sizes.pop() if len(sizes) == 1 else 0
