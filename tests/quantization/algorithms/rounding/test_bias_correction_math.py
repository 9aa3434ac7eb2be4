from __future__ import annotations

import pytest
import torch

from sparsebit.errors import CalibrationError
from sparsebit.quantization.algorithms.rounding.bias_correction_math import Means, analytic_shift, empirical_shift


def test_the_analytic_shift_is_the_difference_of_the_mean_outputs() -> None:
    generator = torch.Generator().manual_seed(0)
    x, W, V = (torch.randn(3, n, 5, dtype=torch.float64, generator=generator) for n in (40, 4, 4))
    expected = (x @ W.mT - x @ V.mT).mean(1)
    torch.testing.assert_close(analytic_shift(W, V, x.mean(1)), expected)
    assert analytic_shift(W, W, x.mean(1)).abs().max() == 0


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_means_over_batches_are_those_of_all(axis: int) -> None:
    x = torch.randn(6, 6, 5, 6, generator=torch.Generator().manual_seed(0))
    whole, first, second = Means(), Means(), Means()
    whole.add(x, axis)
    for part in x.split(2, 2):
        (second if len(part) > 2 and first.count else first).add(part, axis)
    first.merge(Means())
    again = Means.from_state(first.state())
    again.merge(second)
    torch.testing.assert_close(again.value, x.double().movedim(axis, 0).flatten(1).mean(1))
    torch.testing.assert_close(whole.value, again.value)
    torch.testing.assert_close(empirical_shift(whole, again), torch.zeros(6, dtype=torch.float64))


def test_weights_count_as_repetitions() -> None:
    one, other = Means(), Means()
    one.add(torch.tensor([1.0, 2.0]), 0, weight=3)
    one.add(torch.tensor([5.0, 2.0]), 0)
    other.add(torch.tensor([[1.0, 1.0, 1.0, 5.0], [2.0, 2.0, 2.0, 2.0]]), 0)
    assert one.count == other.count == 4 and torch.equal(one.value, other.value)


def test_nothing_was_counted() -> None:
    with pytest.raises(CalibrationError, match="no value"):
        Means().value  # noqa: B018
