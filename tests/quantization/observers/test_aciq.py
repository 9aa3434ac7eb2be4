from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparsebit.numerics.spec import PerChannel, TensorSpec
from sparsebit.quantization.observers import build_observer
from sparsebit.quantization.observers.aciq import AciqOptions, best_step, moments
from sparsebit.quantization.observers.aciq import aciq_range as aciq_range_by
from sparsebit.quantization.observers.distortion import HistogramDistortion
from sparsebit.quantization.observers.histogram import Histogram
from sparsebit.quantization.observers.mse import mse_range
from tests.quantization.observers.histograms import histogram_of


def aciq_range(histogram: Histogram, spec: TensorSpec, distribution: str) -> tuple[Tensor, Tensor]:
    return aciq_range_by(histogram, spec, distribution, HistogramDistortion(histogram, spec))


# J. Max, "Quantizing for minimum distortion" (1960), table II: best uniform step for a unit Gaussian.
@pytest.mark.parametrize(("num_levels", "step"), [(2, 1.596), (4, 0.9957), (8, 0.5860), (16, 0.3352), (32, 0.1881)])
def test_gaussian_steps_are_those_of_max(num_levels: int, step: float) -> None:
    assert best_step("GAUS", False, num_levels, -(num_levels - 1) / 2) == pytest.approx(step, rel=1e-3)


def test_laplace_step_of_one_bit_is_known() -> None:
    # Levels at -1 and 1: the mean of |x|.
    assert best_step("LAPLACE", False, 2, -0.5) == pytest.approx(2, rel=1e-3)


@pytest.mark.parametrize("distribution", ["GAUS", "LAPLACE"])
@pytest.mark.parametrize("one_sided", [False, True], ids=["whole", "half"])
def test_clipping_widens_with_the_bits(distribution: str, one_sided: bool) -> None:
    reach = [
        best_step(distribution, one_sided, 1 << b, 0 if one_sided else -(1 << b - 1)) * 2.0**b
        for b in (2, 3, 4, 6, 8, 11)
    ]
    assert reach == sorted(reach)


@pytest.mark.parametrize("distribution", ["GAUS", "LAPLACE"])
@pytest.mark.parametrize("relu", [False, True], ids=["whole", "half"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "affine"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_is_the_least_error_where_the_model_is_right(bits: int, symmetric: bool, relu: bool, distribution: str) -> None:
    x = torch.randn(400_000) if distribution == "GAUS" else torch.distributions.Laplace(0.0, 1.0).sample((400_000,))
    histogram, spec = histogram_of(3 * (x.relu() if relu else x)), TensorSpec(bits, symmetric)
    distortion = HistogramDistortion(histogram, spec)
    best = distortion(*(end[:, None] for end in mse_range(histogram.low, histogram.high, spec, distortion)))
    found = distortion(*(end[:, None] for end in aciq_range(histogram, spec, distribution)))
    assert float(found / best) < 1.1


@pytest.mark.parametrize("bits", [3, 8])
def test_never_errs_more_than_minmax_where_the_model_is_wrong(bits: int) -> None:
    pile = (4 * torch.randn(1, 30_000)).clamp(0, 6)
    two_modes = torch.cat([0.1 * torch.randn(1, 29_000), 30 + torch.randn(1, 1_000)], 1)
    histogram, spec = histogram_of(torch.cat([pile, two_modes])), TensorSpec(bits, False, PerChannel(0))
    distortion = HistogramDistortion(histogram, spec)
    minmax = distortion(histogram.low[:, None], histogram.high[:, None])
    assert (distortion(*(end[:, None] for end in aciq_range(histogram, spec, "GAUS"))) <= minmax).all()


def test_moments_leave_zeros_out_and_are_per_row() -> None:
    rows = torch.stack([torch.randn(50_000) + 1, torch.randn(50_000).relu(), 20 * torch.randn(50_000)])
    for distribution, order in (("GAUS", 2), ("LAPLACE", 1)):
        mean, about_mean, about_zero = moments(histogram_of(rows), distribution)
        for index, row in enumerate(rows):
            values = row[row != 0].double()
            assert float(mean[index]) == pytest.approx(float(values.mean()), rel=0.01, abs=0.03)
            spread = (values - values.mean()).abs().pow(order).mean() ** (1 / order)
            assert float(about_mean[index]) == pytest.approx(float(spread), rel=0.01)
            assert float(about_zero[index]) == pytest.approx(
                float(values.abs().pow(order).mean() ** (1 / order)), rel=0.01
            )


def test_per_channel_does_not_depend_on_the_number_of_channels() -> None:
    row = torch.randn(1, 2000)
    spec = TensorSpec(4, True, PerChannel(0))
    few, many = (aciq_range(histogram_of(row.repeat(count, 1)), spec, "GAUS")[1] for count in (2, 30))
    torch.testing.assert_close(few[0], many[0])
    torch.testing.assert_close(many, many[:1].expand(30))


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "affine"])
@pytest.mark.parametrize("bits", [1, 2, 8, 9, 12])
def test_any_bits_clip_a_long_tail(bits: int, symmetric: bool) -> None:
    observer = build_observer("aciq", TensorSpec(bits, symmetric), AciqOptions(DISTRIBUTION="LAPLACE"))
    observer.update(torch.distributions.Laplace(0.0, 1.0).sample((100_000,)))
    low, high = observer.calc_range()
    assert low < 0 <= high
    assert max(-float(low), float(high)) <= 17
