"""The parts of the data: no sample judges what it calibrated, nor is it judged by twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebit.compress.judging.samples import split
from sparsebit.errors import CalibrationError

X = torch.arange(512.0).reshape(512, 1)


def values(batches: list[Any]) -> list[float]:
    return torch.cat([batch[0] if isinstance(batch, tuple) else batch for batch in batches]).flatten().tolist()


FORMS = {"tensor": X, "batches": list(X.split(32)), "large": list(X.split(300)), "pairs": [(X, X.long())]}


@pytest.mark.parametrize("data", FORMS.values(), ids=FORMS)
def test_without_validation_the_first_half_calibrates(data: Any) -> None:
    found = split(data, None, needs_samples=True)
    parts = [values(part) for part in (found.calibration, found.selection, found.final)]
    assert sorted([*parts[0], *parts[1], *parts[2]]) == X.flatten().tolist()
    assert 200 <= len(parts[0]) <= 320 and max(parts[0]) < min(parts[1] + parts[2])
    assert min(len(part) for part in parts[1:]) >= 64


def test_validation_is_split_and_all_data_calibrates() -> None:
    found = split(X, list(X.split(64)), needs_samples=True)
    assert values(found.calibration) == X.flatten().tolist()
    assert len(found.selection) == len(found.final) == 4
    assert not set(values(found.selection)) & set(values(found.final))


def test_a_metric_with_data_of_its_own_leaves_all_for_calibration() -> None:
    found = split(list(X.split(8)), None, needs_samples=False)
    assert len(found.calibration) == 64 and not found.selection and not found.final


def test_few_samples_are_taken_apart() -> None:
    found = split(X[:8], None, needs_samples=True)
    assert [len(values(part)) for part in (found.calibration, found.selection, found.final)] == [4, 2, 2]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "data holds no batches"),
        ([(torch.zeros(4, 2), [torch.zeros(3, 4)] * 4)], "cannot be split, and 4 are needed"),
        ([{"x": torch.zeros(4, 2), "table": torch.zeros(7)}] * 3, "holds 3 batches that cannot"),
    ],
)
def test_too_little(data: Any, message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        split(data, None, needs_samples=True)


def test_batches_that_hold_more_than_rows_stay_whole() -> None:
    targets = [[torch.zeros(number, 4) for number in range(4)] for _ in range(4)]
    data = [(torch.full((4, 1), float(place)), targets[place]) for place in range(4)]
    found = split(data, None, needs_samples=True)
    kept: list[Tensor] = [batch[0] for part in (found.calibration, found.selection, found.final) for batch in part]
    assert [float(part[0]) for part in kept] == [0.0, 1.0, 2.0, 3.0]
