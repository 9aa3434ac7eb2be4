from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sparsebit.numerics.spec import PerChannel, TensorSpec
from sparsebit.quantization.observers import build_observer
from sparsebit.quantization.observers.distortion import HistogramDistortion
from sparsebit.quantization.observers.histogram import Histogram
from sparsebit.quantization.observers.kl import kl_divergence
from sparsebit.quantization.observers.kl import kl_range as kl_range_by
from tests.quantization.observers.histograms import histogram_of


def kl_range(histogram: Histogram, spec: TensorSpec) -> tuple[Tensor, Tensor]:
    return kl_range_by(histogram, spec, HistogramDistortion(histogram, spec))


def classic(histogram: Histogram, step: float, num_levels: int) -> float:
    """The divergence inside the range by the book, a Python loop over the bins of a positive histogram's levels."""
    counts, edges = histogram.counts[0, 0].double(), histogram.edges[0]
    width, top, found = edges.diff(), (num_levels - 1) * step, 0.0
    for level in range(num_levels):
        start, stop = max(0.0, (level - 0.5) * step), min(top, (level + 0.5) * step)
        share = ((edges[1:].clamp(max=stop) - edges[:-1].clamp(min=start)).clamp(min=0) / width).where(counts > 0, 0)
        inside = counts * share
        image = float(inside.sum()) / float((width * share).sum().clamp(min=1e-30))
        for c, w, part in zip(counts.tolist(), width.tolist(), share.tolist(), strict=True):
            found += c * part * math.log(c / w / image) if c * part else 0.0
        found -= max(0.0, float(share.sum()) - 1) / 2
    total = float(counts.sum())
    return found + total * math.log(float((counts * (edges[1:] <= top)).sum()) / total)


def test_divergence_inside_the_range_is_the_classic_one() -> None:
    counts = torch.randint(0, 50, (256,), generator=torch.Generator().manual_seed(3))
    counts[::5] = 0
    values = torch.repeat_interleave((torch.arange(256) + 0.5), counts)
    histogram = histogram_of(torch.cat([values, torch.tensor([2049.0])]))
    num_levels, step = 16, 16.0
    low, high = torch.zeros(1, 1).double(), torch.full((1, 1), 15.0 * 16).double()
    beyond, near = int((values > 240).sum()) + 1, int(((values > 232) & (values < 240)).sum())
    tail = (near + beyond) * math.log1p(beyond / near)
    expected = classic(histogram, step, num_levels) + tail
    assert float(kl_divergence(histogram, TensorSpec(4, False), low, high)) == pytest.approx(expected)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_threshold_follows_the_scale_of_the_bulk_not_the_maximum(scale: float) -> None:
    bulk = scale * torch.randn(200_000)
    thresholds = []
    for outlier in (8, 12, 25):
        _, high = kl_range(histogram_of(torch.cat([bulk, torch.tensor([scale * outlier])])), TensorSpec(6, True))
        thresholds.append(float(high) / scale)
    assert all(3 < threshold < 5.5 for threshold in thresholds), thresholds


def test_threshold_reacts_to_the_distribution() -> None:
    spec = TensorSpec(4, True)
    fractions = {}
    for name, x in {
        "uniform": torch.rand(100_000),
        "gauss": torch.randn(100_000),
        "cube": torch.randn(100_000) ** 3,
    }.items():
        x[-1] = 0.99 * x.abs().max()
        _, high = kl_range(histogram_of(x), spec)
        fractions[name] = float(high) / float(x.abs().max())
    assert fractions["uniform"] > 0.9 > fractions["gauss"] > 1.5 * fractions["cube"]


@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_of_a_relu_do_not_draw_the_threshold_down(bits: int) -> None:
    positive = torch.randn(100_000).abs()
    spec = TensorSpec(bits, False)
    alone = kl_range(histogram_of(positive), spec)
    with_zeros = kl_range(histogram_of(torch.cat([positive, torch.zeros(900_000)])), spec)
    assert with_zeros == alone
    assert float(alone[1]) > (4 if bits == 8 else 2.8)


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "affine"])
@pytest.mark.parametrize("num_values", [20, 2_000, 200_000])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_error_is_never_above_that_of_minmax(bits: int, num_values: int, symmetric: bool) -> None:
    spec = TensorSpec(bits, symmetric)
    generator = torch.Generator().manual_seed(num_values)
    gauss = torch.randn(3, num_values, generator=generator)
    relu6_with_a_pile = (4 * gauss[:1]).clamp(0, 6)
    histogram = histogram_of(torch.cat([relu6_with_a_pile, gauss[1:2] ** 3, gauss[2:]]))
    low, high = kl_range(histogram, spec)
    distortion = HistogramDistortion(histogram, spec)
    minmax = distortion(histogram.low[:, None], histogram.high[:, None])
    assert (distortion(low[:, None], high[:, None]) <= minmax * (1 + 1e-6)).all()


def test_a_small_sample_is_not_clipped_for_its_noise() -> None:
    x = torch.randn(10_000)
    _, high = kl_range(histogram_of(x), TensorSpec(8, True))
    assert float(high) > 3.7


def test_rows_are_searched_independently() -> None:
    rows = torch.randn(4, 3000) * 4.0 ** torch.arange(4)[:, None]
    spec = TensorSpec(4, True, PerChannel(0))
    together = kl_range(histogram_of(rows), spec)
    turned = kl_range(histogram_of(rows.flip(0)), spec)
    torch.testing.assert_close(together[1], turned[1].flip(0))


@pytest.mark.parametrize("target", ["weight", "activation"])
@pytest.mark.parametrize("bits", [1, 4, 8, 16])
def test_observer_for_any_bits(target: str, bits: int) -> None:
    observer = build_observer("kl_histogram", TensorSpec(bits, True, PerChannel(0)), target=target)  # type: ignore[arg-type]
    observer.update(torch.cat([torch.randn(2, 100), torch.zeros(1, 100)]))
    low, high = observer.calc_range()
    assert low.shape == high.shape == (3,)
    assert (low[2], high[2]) == (0, 0)
