from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparsebit.errors import CalibrationError
from sparsebit.quantization.observers.statistics import (
    BINS_OF_LONE_ROW,
    BINS_OF_MANY_ROWS,
    Histogram,
    MinMax,
    MovingMinMax,
    Samples,
    Statistic,
)

KINDS: dict[str, Callable[[], Statistic]] = {
    "minmax": MinMax,
    "moving": lambda: MovingMinMax(0.7),
    "samples": Samples,
    "histogram": Histogram,
}


def of(kind: str, *parts: Tensor) -> Statistic:
    statistic = KINDS[kind]()
    for part in parts:
        statistic.update(part)
    return statistic


def assert_same(one: Statistic, other: Statistic, exact: bool = True) -> None:
    left, right = one.state(), other.state()
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], **({"rtol": 0, "atol": 0} if exact else {}))


@pytest.fixture(params=[1, 5], ids=["lone_row", "many_rows"])
def parts(request: pytest.FixtureRequest) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    scales = 2.0 ** torch.arange(request.param)[:, None]
    sizes_and_gains = ((7, 0.01), (300, 1.0), (40, 300.0), (1, 5.0))
    return [torch.randn(request.param, n, generator=generator) * scales * gain for n, gain in sizes_and_gains]


@pytest.mark.parametrize("kind", KINDS)
def test_merged_halves_are_the_whole(kind: str, parts: list[Tensor]) -> None:
    merged = of(kind, *parts[:2])
    merged.merge(of(kind, *parts[2:]))
    assert_same(merged, of(kind, *parts), exact=kind != "moving")


@pytest.mark.parametrize("kind", KINDS)
def test_empty_is_neutral(kind: str, parts: list[Tensor]) -> None:
    whole, empty = of(kind, *parts), of(kind)
    assert empty.is_empty and empty.state() == {}
    before = copy.deepcopy(whole)
    whole.merge(empty)
    assert_same(whole, before)
    empty.merge(whole)
    assert_same(whole, empty)


@pytest.mark.parametrize("kind", KINDS)
def test_state_pickle_and_deepcopy_keep_everything(kind: str, parts: list[Tensor]) -> None:
    whole = of(kind, *parts[:2])
    loaded = of(kind)
    loaded.load_state(whole.state())
    copies = [loaded, copy.deepcopy(whole), pickle.loads(pickle.dumps(whole))]
    for one in (whole, *copies):
        one.update(parts[2])
    for one in copies:
        assert_same(one, whole)


@pytest.mark.parametrize("kind", KINDS)
def test_another_number_of_rows_is_refused(kind: str) -> None:
    with pytest.raises(CalibrationError, match=r"4 channels or groups after 3.*LAYOUT"):
        of(kind, torch.ones(3, 2), torch.ones(4, 2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_values_are_refused(kind: str, bad: float) -> None:
    with pytest.raises(CalibrationError, match="NaN or infinity"):
        of(kind, torch.tensor([[1.0, bad, 2.0]]))


def test_moving_average_follows_its_recursion(parts: list[Tensor]) -> None:
    low, high = parts[0].double().amin(1), parts[0].double().amax(1)
    for part in parts[1:]:
        low, high = 0.7 * low + 0.3 * part.amin(1), 0.7 * high + 0.3 * part.amax(1)
    statistic = MovingMinMax(0.7)
    for part in parts:
        statistic.update(part)
    torch.testing.assert_close(statistic.range(), (low, high))


@given(
    values=st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False) | st.floats(-1, 1, width=32) | st.just(0.0),
        min_size=1,
        max_size=40,
    ),
    cut=st.integers(0, 40),
    data=st.data(),
)
def test_histogram_knows_no_order(values: list[float], cut: int, data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(values))
    whole = of("histogram", torch.tensor([values]))
    merged = of("histogram", *(torch.tensor([[value]]) for value in shuffled[:cut]))
    merged.merge(of("histogram", *(torch.tensor([part]) for part in [shuffled[cut:]] if part)))
    assert_same(merged, whole)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("side", ["both", "positive", "negative"])
@pytest.mark.parametrize("gain", [1e-30, 1.0, 3.7e6])
def test_histogram_counts_every_value_in_its_bin(num_rows: int, side: str, gain: float) -> None:
    rows = torch.randn(num_rows, 5000, generator=torch.Generator().manual_seed(1)) * gain
    rows = {"both": rows, "positive": rows.relu(), "negative": -rows.relu()}[side]
    rows[:, ::7] = 0
    histogram = of("histogram", *rows.split(1234, dim=1))
    assert isinstance(histogram, Histogram)
    assert histogram.counts is not None
    bins = BINS_OF_LONE_ROW if num_rows == 1 else BINS_OF_MANY_ROWS
    assert histogram.counts.shape == (num_rows, bins)
    for row in range(num_rows):
        values = rows[row][rows[row] != 0].double()
        index = (values / histogram.width[row]).floor().long() - histogram.first_bin[row]
        assert torch.equal(histogram.counts[row], torch.bincount(index, minlength=bins))
        assert histogram.zeros[row] == (rows[row] == 0).sum()
        assert (histogram.low[row], histogram.high[row]) == (min(0, rows[row].min()), max(0, rows[row].max()))
        span = (histogram.high[row] - histogram.low[row]) / histogram.width[row]
        assert bins / 2 - 1 <= span <= bins, "the bins are as narrow as the window allows"


def test_histogram_of_a_long_row_is_binned_in_parts() -> None:
    row = torch.randn(1, (1 << 20) + 17, generator=torch.Generator().manual_seed(2)).bfloat16()
    histogram = of("histogram", row)
    assert isinstance(histogram, Histogram)
    assert histogram.counts is not None
    assert int(histogram.counts.sum() + histogram.zeros) == row.numel()


def test_histogram_of_zeros() -> None:
    histogram = of("histogram", torch.zeros(2, 9))
    assert isinstance(histogram, Histogram)
    assert histogram.counts is not None
    assert int(histogram.counts.sum()) == 0
    assert histogram.zeros.tolist() == [9, 9]
    histogram.update(torch.tensor([[1.0], [-1e-3]]))
    assert histogram.counts.sum(1).tolist() == [1, 1]
