"""Confidence intervals against scipy."""

from __future__ import annotations

import math

import pytest
import torch

from sparsebit.numerics.intervals import difference_margin, mean_margin, share_interval, student_quantile

stats = pytest.importorskip("scipy.stats")


@pytest.mark.parametrize(("right", "total"), [(0, 1), (1, 1), (0, 7), (1, 3), (7, 9), (900, 1000), (1000, 1000)])
def test_the_interval_of_a_share_is_wilsons(right: int, total: int) -> None:
    expected = stats.binomtest(right, total).proportion_ci(0.95, method="wilson")
    assert share_interval(right, total) == pytest.approx((expected.low, expected.high), rel=1e-4, abs=1e-12)


def test_the_interval_of_a_share_stays_within_0_and_1() -> None:
    """Rounding errors of these would lead beyond."""
    assert share_interval(0, 15)[0] == 0.0
    assert share_interval(19, 19)[1] == 1.0


@pytest.mark.parametrize("confidence", [0.9, 0.95])
@pytest.mark.parametrize(("lost", "gained", "total"), [(0, 0, 1), (9, 4, 1000), (4, 9, 1000), (5, 0, 5)])
def test_the_margin_of_a_difference_is_that_of_its_samples(
    lost: int, gained: int, total: int, confidence: float
) -> None:
    """Agresti and Min: of two samples more, of which one half is lost, one half gained."""
    count = total + 2
    variance = (lost + gained + 1 - (lost - gained) ** 2 / count) / count  # of +1, 0 and -1 per sample
    expected = stats.norm.ppf(0.5 + confidence / 2) * math.sqrt(variance / count)
    assert difference_margin(lost, gained, total, confidence) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("confidence", [0.9, 0.95])
@pytest.mark.parametrize("count", [2, 3, 4, 10, 400])
def test_the_margin_of_a_mean_is_students(count: int, confidence: float) -> None:
    differences = torch.linspace(-1, 2, count, dtype=torch.float64).square()
    low, high = stats.ttest_1samp(differences.numpy(), 0.0).confidence_interval(confidence)
    rel = {2: 1e-12, 3: 1e-12, 4: 0.008}.get(count, 2e-4)
    assert mean_margin(differences, confidence) == pytest.approx((high - low) / 2, rel=rel)


def test_the_usual_confidence_is_95_percent() -> None:
    differences = torch.tensor([0.1, 0.2, 0.3, 0.2])
    assert mean_margin(differences) == mean_margin(differences, 0.95)
    assert difference_margin(9, 4, 1000) == difference_margin(9, 4, 1000, 0.95)


def test_a_single_difference_has_no_bound() -> None:
    assert mean_margin(torch.zeros(0)) == mean_margin(torch.zeros(1)) == math.inf


@pytest.mark.parametrize("probability", [0.9, 0.975, 0.995])
def test_the_error_of_students_quantile_falls_with_the_fourth_power(probability: float) -> None:
    """As it must, if the terms of the expansion up to the third power are the right ones."""
    for freedom in (3, 10, 100, 1000):
        error = abs(student_quantile(probability, freedom) - stats.t.ppf(probability, freedom))
        assert error <= (2 if probability < 0.99 else 16) / freedom**4
