from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebit.execution.sample_rows import SampleRows, find_sample_rows

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
SQUARE, NUMBERS = torch.arange(36.0).view(6, 6), torch.arange(6.0)


def with_table(x: Tensor, table: Tensor) -> Tensor:
    return (x[:, :1] + table.sum(0)) * x.sum(1, keepdim=True)


def with_two(x: Tensor, table: Tensor, row: Tensor) -> Tensor:
    return with_table(x, table) * row[:, None]


@pytest.mark.parametrize(
    ("run", "inputs", "expected"),
    [
        (torch.add, (X, X), (True, True)),
        (with_table, (X, SQUARE), (True, False)),
        (lambda table, x: with_table(x, table), (SQUARE, X), (False, True)),
        (lambda x, row: x * row[:, None], (X, NUMBERS), (True, True)),
        (with_two, (X, SQUARE, NUMBERS), (True, False, True)),
        (lambda x, table: (with_table(x, table), table.sum()), (X, SQUARE), (True, False)),
        (lambda x, table: x - x.mean(0) + 0 * table.mean(), (X, SQUARE), (True, True)),
        (lambda x, table: x.sum() + table.sum(), (X, SQUARE), (True, True)),
    ],
    ids=["alike", "table", "table first", "a number each", "three", "two outputs", "rows that depend", "no rows"],
)
def test_a_table_with_as_many_rows_is_told_from_samples(run: Any, inputs: tuple[Tensor, ...], expected: Any) -> None:
    found = find_sample_rows((inputs, {}), run)
    assert found == SampleRows(6, expected)
    assert found == find_sample_rows((inputs, {}), run, run(*inputs))


def test_one_sample_needs_no_run() -> None:
    def run(*_: Any) -> Any:
        raise AssertionError("was run")

    assert find_sample_rows(((X[:1], SQUARE[:1]), {}), run) == SampleRows(1, (True, True))


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda x: x * 2, (6, True)),
        (lambda x: x.reshape(-1, 2), (6, True)),
        (lambda x: torch.nn.functional.conv1d(x, torch.ones(3, 6, 1)), (1, False)),
        (lambda x: x.view(6, 4).sum(), (1, False)),
    ],
    ids=["rows", "more rows", "channels in front", "a fixed batch size"],
)
def test_a_call_that_cannot_be_cut_is_one_sample(run: Any, expected: tuple[int, bool]) -> None:
    found = find_sample_rows(((X,), {}), run)
    assert (found.count, *found.has_rows) == expected


def test_samples_are_cut_by_keyword_too() -> None:
    call = ((), {"table": SQUARE, "x": X})
    found = find_sample_rows(call, with_table)
    _, kwargs = found.of(call, [4, 0])
    assert torch.equal(kwargs["x"], X[[4, 0]]) and kwargs["table"] is SQUARE
    assert found.of(call, range(6)) is call and [t is X for t in found.tensors(call)] == [True]


def test_a_model_that_writes_into_its_inputs() -> None:
    x, kept = X.clone(), X.clone()
    find_sample_rows(((x, SQUARE), {}), lambda x, table: x.add_(1).sum(1, keepdim=True) + table)
    assert torch.equal(x, kept)
