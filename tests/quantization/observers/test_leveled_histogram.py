from __future__ import annotations

import torch
from torch import Tensor

from sparsebit.numerics.qparams import qparams_from_range
from sparsebit.numerics.reference import fake_quantize
from sparsebit.numerics.spec import TensorSpec
from sparsebit.quantization.observers import build_observer
from sparsebit.quantization.observers.distortion import HistogramDistortion
from sparsebit.quantization.observers.histogram import Histogram
from sparsebit.quantization.observers.leveled_histogram import MOST_LEVELS, LeveledHistogram
from sparsebit.quantization.observers.mse import mse_range

SPEC = TensorSpec(4, symmetric=False)


def samples(num_large: int = 0, count: int = 200) -> Tensor:
    x = torch.randn(count, 4, 5, 5, generator=torch.Generator().manual_seed(0)).relu()
    x[:num_large] *= 100
    return x


def leveled(*parts: Tensor) -> LeveledHistogram:
    statistic = LeveledHistogram()
    for part in parts:
        statistic.update(part)
    return statistic


def observed(x: Tensor) -> tuple[Tensor, Tensor]:
    observer = build_observer("mse", SPEC)
    for batch in x.split(64):
        observer.update(batch)
    return observer.calc_range()


def test_samples_of_usual_sizes_give_the_range_of_all_values_bit_by_bit() -> None:
    x = samples() * 2 ** torch.linspace(-2, 0, 200)[:, None, None, None]  # of several octaves
    histogram = Histogram()
    histogram.update(x.reshape(1, -1))
    assert len(leveled(x).histograms) > 1
    expected = mse_range(histogram.low, histogram.high, SPEC, HistogramDistortion(histogram, SPEC))
    assert [float(end) for end in observed(x)] == [float(end.float()) for end in expected]


def test_a_few_far_larger_samples_leave_the_others_their_codes() -> None:
    x = samples(num_large=2)
    assert leveled(x).num_far == 2 and leveled(samples()).num_far == 0

    def error(ends: tuple[Tensor, Tensor]) -> float:
        return float((fake_quantize(x[2:], *qparams_from_range(*ends, SPEC), SPEC) - x[2:]).square().mean())

    best = error(observed(x[2:]))
    assert error(observed(x)) < 3 * best
    histogram = Histogram()
    histogram.update(x.reshape(1, -1))
    ends = mse_range(histogram.low, histogram.high, SPEC, HistogramDistortion(histogram, SPEC))
    assert error((ends[0].float(), ends[1].float())) > 10 * best


def test_many_large_samples_are_no_exception() -> None:
    x = samples(num_large=20)
    assert float(observed(x)[1]) > 100


def test_knows_neither_order_nor_batches_and_merges() -> None:
    x = samples(num_large=3) * 2.0 ** torch.arange(200).remainder(9)[:, None, None, None]
    whole = leveled(x)
    parts = leveled(*x.flip(0).split(7))
    merged = leveled(x[50:])
    merged.merge(leveled(x[:50]))
    loaded = LeveledHistogram()
    loaded.load_state(parts.state())
    assert len(whole.histograms) == MOST_LEVELS and sum(whole.num_samples.values()) == 200
    for other in (parts, merged, loaded):
        assert other.num_samples == whole.num_samples
        for name, value in whole.combined().state().items():
            assert torch.equal(other.combined().state()[name], value), name


def test_a_token_that_is_far_larger_than_the_others_counts_in_full() -> None:
    """The first dimension may be tokens (`nn.TransformerEncoder`), and the first of them what is read in the end."""
    x = torch.randn(64, 8, 16, generator=torch.Generator().manual_seed(0))
    x[0] *= 100
    assert float(observed(x)[1]) > 100
    assert len(leveled(x, x[1:]).histograms) == 1


def test_one_dimension_is_one_sample() -> None:
    assert sum(leveled(torch.randn(30)).num_samples.values()) == 1
