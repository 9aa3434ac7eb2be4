from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sparsebit.errors import CalibrationError
from sparsebit.quantization.observers.histogram import Histogram
from sparsebit.quantization.observers.statistics import MinMax, MovingMinMax, Samples, Statistic

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
