from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsebit.numerics.qparams import qparams_from_range
from sparsebit.numerics.reference import fake_quantize
from sparsebit.numerics.spec import PerChannel, TensorSpec
from sparsebit.quantization.observers import build_observer
from sparsebit.quantization.observers.distortion import HistogramDistortion
from sparsebit.quantization.observers.histogram import CHUNK, NUM_OCTAVES, Histogram
from sparsebit.quantization.observers.ranges import PercentileOptions
from tests.quantization.observers.histograms import histogram_of

PER_TENSOR = TensorSpec(8, symmetric=False)
PER_CHANNEL = PER_TENSOR.replace(granularity=PerChannel(0))


def assert_same(one: Histogram, other: Histogram) -> None:
    for name, value in one.state().items():
        assert torch.equal(value, other.state()[name]), name


FLOATS = (
    st.floats(width=32, allow_nan=False, allow_infinity=False)
    | st.floats(-1, 1, width=32)
    | st.floats(-(2.0**-38), 2.0**-38, width=32)
    | st.sampled_from(
        [0.0, -0.0, 1.0, 2.0**-39, -(2.0**-40), float(torch.tensor(2.0**-39).nextafter(torch.tensor(0.0)))]
    )
)


@given(values=st.lists(FLOATS, min_size=1, max_size=40), cut=st.integers(0, 40), data=st.data())
def test_knows_no_order(values: list[float], cut: int, data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(values))
    whole = histogram_of(torch.tensor([values]))
    merged = histogram_of(*(torch.tensor([[value]]) for value in shuffled[:cut]))
    merged.merge(histogram_of(*(torch.tensor([part]) for part in [shuffled[cut:]] if part)))
    assert_same(merged, whole)


@pytest.mark.parametrize("num_rows", [1, 3, 300])
@pytest.mark.parametrize("side", ["both", "positive", "negative"])
@pytest.mark.parametrize("gain", [1e-30, 1.0, 3.7e6, 1e30])
def test_counts_every_value_in_its_bin(num_rows: int, side: str, gain: float) -> None:
    rows = torch.randn(num_rows, 500, generator=torch.Generator().manual_seed(1)) * gain
    rows = {"both": rows, "positive": rows.relu(), "negative": -rows.relu()}[side]
    rows[:, ::7] = 0
    histogram = histogram_of(*rows.split(123, dim=1))
    counts, edges = histogram.counts, histogram.edges
    assert counts.shape == (num_rows, 2, (NUM_OCTAVES << histogram.bits) + 1)
    for row in range(0, num_rows, 97):
        values = rows[row][rows[row] != 0].double()
        index = torch.searchsorted(edges[row], values.abs(), right=True) - 1
        assert torch.equal(histogram.bin_of(values.abs()[None].repeat(num_rows, 1))[row], index)
        for sign, of_sign in enumerate((values > 0, values < 0)):
            assert torch.equal(counts[row, sign], torch.bincount(index[of_sign], minlength=counts.shape[2]))
        assert histogram.zeros[row] == (rows[row] == 0).sum()
        assert (histogram.low[row], histogram.high[row]) == (min(0, rows[row].min()), max(0, rows[row].max()))


def test_a_long_row_is_binned_in_parts() -> None:
    row = torch.randn(1, CHUNK + 17, generator=torch.Generator().manual_seed(2)).bfloat16()
    histogram = histogram_of(row)
    assert int(histogram.counts.sum() + histogram.zeros) == row.numel()


def test_of_zeros() -> None:
    histogram = histogram_of(torch.zeros(2, 9))
    assert int(histogram.counts.sum()) == 0
    assert histogram.zeros.tolist() == [9, 9]
    histogram.update(torch.tensor([[1.0], [-1e-3]]))
    assert histogram.counts.sum((1, 2)).tolist() == [1, 1]
    assert histogram.zeros.tolist() == [9, 9]


def test_the_smallest_values_join_the_zeros() -> None:
    histogram = histogram_of(torch.tensor([[2.0**-30, -(2.0**-30), 1.0]]))
    assert histogram.zeros.tolist() == [0]
    histogram.update(torch.tensor([[2.0**20]]))
    assert histogram.zeros.tolist() == [2]
    assert int(histogram.counts.sum()) == 2


# --- far outliers: what the observers make of the histogram, against the values themselves

OUTLIERS = st.floats(2, 9).flatmap(lambda power: st.sampled_from([10.0**power, -(10.0**power)]))


def bodies(seed: int, num_rows: int, num_batches: int, relu: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scales = 3.0 ** torch.arange(num_rows)[:, None]
    batches = [torch.randn(num_rows, 2000, generator=generator) * scales for _ in range(num_batches)]
    return [batch.relu() for batch in batches] if relu else batches


def percentile_of(rows: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """By sorting: the values that no more than `alpha` of the negative, and of the other values, lie beyond."""
    ends = []
    for row in rows.double():
        negative, others = row[row < 0].sort().values, row[row >= 0].sort(descending=True).values
        ends.append([side[int(alpha * len(side))] if len(side) else row.new_zeros(()) for side in (negative, others)])
    return torch.stack([low for low, _ in ends]), torch.stack([high for _, high in ends])


@settings(max_examples=40, deadline=None)
@given(
    outliers=st.lists(OUTLIERS, min_size=1, max_size=3),
    place=st.sampled_from(["first", "last"]),
    seed=st.integers(0, 10_000),
    num_rows=st.sampled_from([1, 4]),
    relu=st.booleans(),
    merged=st.booleans(),
)
def test_percentile_of_data_with_far_outliers(
    outliers: list[float], place: str, seed: int, num_rows: int, relu: bool, merged: bool
) -> None:
    batches = bodies(seed, num_rows, 3, relu)
    batch = batches[0 if place == "first" else -1]
    batch[:, : len(outliers)] = torch.tensor(outliers)
    options, spec = PercentileOptions(ALPHA=0.01), PER_TENSOR if num_rows == 1 else PER_CHANNEL
    observers = [build_observer("percentile", spec, options) for _ in batches]
    for index, values in enumerate(batches):
        observers[index if merged else 0].update(values)
    for other in observers[1:] if merged else []:
        observers[0].merge(other)
    found = observers[0].calc_range()
    expected = percentile_of(torch.cat(batches, 1), 0.01)
    for end, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(end.double().view(-1), wanted, rtol=0.03, atol=1e-3)


@pytest.mark.parametrize("outlier", [1e2, 1e4, 1e6, 1e9])
def test_percentile_keeps_the_upper_end_of_a_gaussian(outlier: float) -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    observer = build_observer("percentile", PER_TENSOR)
    observer.update(x)
    observer.update(torch.tensor([outlier]))
    assert float(observer.calc_range()[1]) == pytest.approx(float(torch.quantile(x.double(), 0.9995)), rel=0.01)


@settings(max_examples=40, deadline=None)
@given(outlier=OUTLIERS, bits=st.sampled_from([2, 4, 8, 10, 12]), symmetric=st.booleans(), relu=st.booleans())
def test_distortion_of_data_with_a_far_outlier(outlier: float, bits: int, symmetric: bool, relu: bool) -> None:
    rows = torch.cat([*bodies(3, 1, 2, relu), torch.tensor([[outlier]])], 1)
    spec = TensorSpec(bits, symmetric)
    fractions = torch.tensor([[1.0, 0.3, 1e-2, 1e-4, 3 / abs(outlier)]])
    low, high = rows.amin().clamp(max=0) * fractions, rows.amax().clamp(min=0) * fractions
    found = HistogramDistortion(histogram_of(rows), spec)(low, high)
    for column in range(fractions.shape[1]):
        quantized = fake_quantize(rows, *qparams_from_range(low[0, column], high[0, column], spec), spec)
        truth = float((quantized.double() - rows).square().sum())
        # Values are known within their bins, the extremes exactly.
        assert float(found[0, column]) == pytest.approx(truth, rel=0.2, abs=1e-3)


@pytest.mark.parametrize("kind", ["mse", "kl_histogram", "aciq"])
@pytest.mark.parametrize("outlier", [1e2, 1e3, 1e6, 1e9])
@pytest.mark.parametrize("bits", [4, 8])
def test_searches_are_no_worse_than_minmax_on_the_values(kind: str, outlier: float, bits: int) -> None:
    rows = torch.cat([torch.randn(1, 50_000, generator=torch.Generator().manual_seed(4)), torch.tensor([[outlier]])], 1)
    spec = TensorSpec(bits, symmetric=False)
    observer = build_observer(kind, spec)
    observer.update(rows)
    errors = []
    for low, high in (observer.calc_range(), (rows.amin(), rows.amax())):
        quantized = fake_quantize(rows, *qparams_from_range(low, high, spec), spec)
        errors.append(float((quantized.double() - rows).square().sum()))
    assert errors[0] <= errors[1] * 1.01
