from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sparsebit.errors import CalibrationError
from sparsebit.execution.blocks.distances import directed_error, divergence, squared_error


def test_squared_error_is_relative_to_the_targets() -> None:
    target = torch.tensor([[3.0, 4.0]])
    assert float(squared_error((target * 1.1,), (target,))) == pytest.approx(0.01)
    weights = torch.tensor([[1.0, 0.0]])
    assert float(squared_error((torch.tensor([[6.0, 0.0]]),), (target,), (weights,))) == pytest.approx(1.0)


def test_divergence_is_that_of_the_softmaxes() -> None:
    torch.manual_seed(0)
    one, other = torch.randn(5, 7), torch.randn(5, 7)
    expected = F.kl_div(F.log_softmax(one, -1), F.softmax(other, -1), reduction="batchmean")
    torch.testing.assert_close(divergence((one,), (other,)), expected)
    assert float(divergence((one + 3,), (one,))) == pytest.approx(0, abs=1e-6)
    # With a high temperature it becomes half the variance of the differences.
    difference = one - other
    half = 0.5 * difference.var(-1, correction=0).mean()
    torch.testing.assert_close(divergence((one,), (other,), 50.0), half, rtol=0.05, atol=0)


def test_directed_error_sees_only_its_directions() -> None:
    target, weights = torch.ones(2, 2), torch.ones(2, 2)
    direction = torch.tensor([[1.0, -1.0], [1.0, -1.0]])
    along, across = torch.tensor([[0.1, -0.1]] * 2), torch.tensor([[0.1, 0.1]] * 2)
    assert float(directed_error((target + across,), (target,), (weights, direction))) == pytest.approx(0, abs=1e-12)
    # Each sample: (0.1 + 0.1)^2 of an energy of 1 + 1.
    assert float(directed_error((target + along,), (target,), (weights, direction))) == pytest.approx(0.02)
    twice = directed_error((target + along,), (target,), (weights, direction, 2 * direction))
    assert float(twice) == pytest.approx(0.02)


def test_directed_error_of_several_outputs() -> None:
    """All outputs of a sample share one direction. Outputs of whole numbers are left out."""
    outputs, targets = (torch.ones(2, 1), torch.tensor([1, 2])), (torch.zeros(2, 1), torch.tensor([1, 2]))
    others = (torch.ones(2, 1), torch.full((2, 1), 2.0))
    weights = (torch.ones(2, 1), torch.ones(2))
    energy = 2 * 4.0  # the second output's targets are 2
    found = directed_error(
        (*outputs, others[0]), (*targets, others[1]), (*weights, torch.ones(2, 1), *weights, torch.ones(2, 1))
    )
    assert float(found) == pytest.approx(0.0 / energy)  # +1 and -1 cancel


def test_no_float_output() -> None:
    for distance in (squared_error, divergence):
        with pytest.raises(CalibrationError, match="no float output"):
            distance((torch.tensor([1]),), (torch.tensor([1]),))
