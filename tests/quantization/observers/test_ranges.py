from __future__ import annotations

import pytest
import torch
from torch import nn

from sparsebit.numerics.spec import PerChannel, TensorSpec
from sparsebit.quantization import QuantModel
from sparsebit.quantization.observers import build_observer
from sparsebit.quantization.observers.ranges import (
    MovingAverageOptions,
    PercentileOptions,
    magnitude_beyond,
    percentile_range,
)
from tests.quantization.observers.histograms import histogram_of
from tests.quantization.tiny import qconfig

PER_TENSOR = TensorSpec(8, symmetric=False)


def test_minmax_takes_the_extremes_of_all_batches_per_channel() -> None:
    observer = build_observer("minmax", PER_TENSOR.replace(granularity=PerChannel(1)))
    observer.update(torch.tensor([[1.0, -2.0], [3.0, 5.0]]))
    observer.update(torch.tensor([[-4.0, -6.0]]))
    low, high = observer.calc_range()
    assert low.tolist() == [-4, -6]
    assert high.tolist() == [3, 5]


@pytest.mark.parametrize("axis", [None, 1], ids=["per_tensor", "per_channel"])
def test_moving_average_is_per_channel_too(axis: int | None) -> None:
    spec = PER_TENSOR if axis is None else PER_TENSOR.replace(granularity=PerChannel(axis))
    observer = build_observer("moving_average", spec, MovingAverageOptions(EMA_RATIO=0.5))
    observer.update(torch.tensor([[1.0, 8.0], [-1.0, -8.0]]))
    observer.update(torch.tensor([[3.0, 4.0]]))
    low, high = observer.calc_range()
    assert high.tolist() == (6.0 if axis is None else [2.0, 6.0])
    # The second batch has no negative value: its lowest ones, 3 and 4, are averaged in, and zero stays inside.
    assert low.tolist() == (-2.5 if axis is None else [0.0, -2.0])


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.2, 0.5, 0.77, 0.999, 1.0])
def test_magnitude_beyond_agrees_with_the_sorted_values(fraction: float) -> None:
    rows = torch.randn(3, 20_001) * torch.tensor([[1.0], [10.0], [0.1]])
    numbers = torch.stack([(rows > 0).sum(1), (rows < 0).sum(1)], 1) * fraction
    found = magnitude_beyond(histogram_of(rows), numbers)
    for row, signed in enumerate(rows.double()):
        for sign, values in enumerate((signed[signed > 0], -signed[signed < 0])):
            expected = float(torch.quantile(values, 1 - fraction)) if fraction < 1 else 0.0
            assert float(found[row, sign]) == pytest.approx(expected, rel=0.01, abs=2e-4 * float(values.max()))


def test_there_is_nothing_beyond_the_extremes() -> None:
    found = magnitude_beyond(histogram_of(torch.tensor([[-2.0, -1.0, 0.0, 1.0, 3.0]])), torch.zeros(1, 2))
    assert found.tolist() == [[3, 2]]


def test_percentile_cuts_alpha_of_either_side() -> None:
    negative, positive = -torch.linspace(0.001, 1, 1_000), torch.linspace(0, 4, 9_000)
    low, high = percentile_range(histogram_of(torch.cat([negative, positive])[None]), 0.1)
    assert float(low) == pytest.approx(-0.9, abs=0.01)
    assert float(high) == pytest.approx(3.6, abs=0.01)


def test_percentile_counts_the_zeros_of_a_relu() -> None:
    rows = torch.cat([torch.zeros(1, 8_000), torch.linspace(0, 1, 2_001)[None, 1:]], 1)
    low, high = percentile_range(histogram_of(rows), 0.1)
    assert float(low) == 0
    assert float(high) == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize(("sign", "expected"), [(1, (0.0, 9.0)), (-1, (-9.0, 0.0))], ids=["positive", "negative"])
def test_percentile_of_one_sided_data_keeps_zero(sign: int, expected: tuple[float, float]) -> None:
    observer = build_observer("percentile", PER_TENSOR, PercentileOptions(ALPHA=0.1))
    observer.update(sign * torch.linspace(1, 9.888, 1001))
    assert [float(end) for end in observer.calc_range()] == pytest.approx(expected, abs=0.01)


def test_percentile_zero_is_minmax() -> None:
    x = torch.randn(1000)
    observer = build_observer("percentile", PER_TENSOR, PercentileOptions(ALPHA=0))
    observer.update(x)
    assert observer.calc_range() == (x.min(), x.max())


@pytest.mark.parametrize("observer", ["minmax", "moving_average"])
def test_following_ranges_read_the_ratio_whatever_the_observer(observer: str) -> None:
    changes = {
        "A.OBSERVER": {"TYPE": observer, "MOVING_AVERAGE": {"EMA_RATIO": 0.5}},
        "A.SPECIFIC": [{"1": ["OBSERVER.MOVING_AVERAGE.EMA_RATIO", 0.25]}],
    }
    qmodel = QuantModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), qconfig(changes))
    found = {quantizer.name: quantizer.ema_ratio for quantizer in qmodel.quantizers()}
    assert found == {"0.input": 0.5, "0.weight": 0.9, "1.input": 0.25, "1.weight": 0.9}
