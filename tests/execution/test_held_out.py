from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebit.execution.held_out import HoldOut, Split, num_held, split_samples

HALF = HoldOut(0.5)


def split(
    batches: list[dict[str, Any]], run: Callable[[dict[str, Any]], Any], hold_out: HoldOut | None = HALF
) -> Split:
    return split_samples(len(batches), batches.__getitem__, run, hold_out)


def values(batches: list[dict[str, Any]], pieces: Any) -> list[float]:
    return [float(x) for piece in pieces for x in piece.of(batches[piece.batch])["x"].flatten()]


def numbered(*sizes: int) -> list[dict[str, Any]]:
    """Batches of these sizes; each sample is its number."""
    return [{"x": part} for part in torch.arange(float(sum(sizes))).view(-1, 1).split(list(sizes))]


@pytest.mark.parametrize("sizes", [(32,), (5, 5, 2, 1, 7), (1,) * 12], ids=str)
def test_every_sample_is_learned_from_or_held_out(sizes: tuple[int, ...]) -> None:
    batches = numbered(*sizes)
    found = split(batches, lambda inputs: inputs["x"] * 2)
    learned, held = values(batches, found.learned), values(batches, found.held)
    assert sorted(learned + held) == list(range(sum(sizes)))
    assert len(held) == num_held(sum(sizes), 0.5) == sum(sizes) // 2
    assert found == split(batches, lambda inputs: inputs["x"] * 2)
    assert found != split(batches, lambda inputs: inputs["x"] * 2, HoldOut(0.5, seed=1))


@pytest.mark.parametrize("hold_out", [None, HoldOut(0.0)])
def test_without_a_share_the_batches_stay(hold_out: HoldOut | None) -> None:
    batches = numbered(4, 4)

    def run(inputs: dict[str, Any]) -> Any:
        raise AssertionError("nothing is to be tried")

    found = split(batches, run, hold_out)
    assert not found.held and values(batches, found.pieces) == list(range(8))


def fixed_size(inputs: dict[str, Any]) -> Tensor:
    return torch.as_tensor(inputs["x"].view(4, 1))


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(lambda inputs: inputs["x"] - inputs["x"].mean(), id="rows depend on each other"),
        pytest.param(lambda inputs: inputs["x"].sum(), id="one number for all"),
        pytest.param(lambda inputs: inputs["x"].t(), id="no row for each input"),
        pytest.param(fixed_size, id="a fixed batch size"),
    ],
)
def test_a_batch_whose_rows_are_no_samples_is_one_sample(run: Callable[[dict[str, Any]], Any]) -> None:
    batches = numbered(4, 4, 4, 4)
    found = split(batches, run)
    assert len(found.held) == 2 and all(piece.rows is None for piece in found.pieces)
    assert not split(batches[:1], run).held  # what there is is learned from


def test_constants_stay_whole() -> None:
    batches = [{"x": torch.randn(6, 3), "table": torch.randn(5, 3)} for _ in range(2)]
    found = split(batches, lambda inputs: inputs["x"] @ inputs["table"].T)
    for piece in found.pieces:
        cut = piece.of(batches[piece.batch])
        assert len(cut["x"]) < 6 and cut["table"] is batches[piece.batch]["table"]


def test_a_batch_of_another_form_is_one_sample() -> None:
    batches = [*numbered(6, 6), {"x": [torch.zeros(6, 1), torch.zeros(6, 1)]}]
    found = split(batches, lambda inputs: inputs["x"] * 2)
    assert [piece.rows for piece in found.pieces if piece.batch == 2] == [None]
