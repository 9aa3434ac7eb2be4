"""Observers whose range follows from the statistic without a search: minmax, moving_average, percentile."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from sparsebit.config.section import Section
from sparsebit.config.targets import ACTIVATION, Target
from sparsebit.config.tensor_config import TensorConfig
from sparsebit.quantization.observers.histogram import Histogram
from sparsebit.quantization.observers.observer import HistogramObserver, Observer, Range, register_observer
from sparsebit.quantization.observers.statistics import MinMax, MovingMinMax


def percentile_range(histogram: Histogram, alpha: float) -> Range:
    """All but the fraction `alpha` of the negative values, and all but `alpha` of the others, `(R,)` each.

    So one-sided rows keep zero as their end, and skewed rows lose as much of their short side as of their long one.
    """
    positive, negative = histogram.counts.sum(2).unbind(1)
    high, low = magnitude_beyond(histogram, alpha * torch.stack([positive + histogram.zeros, negative], 1)).unbind(1)
    return -low, high


def magnitude_beyond(histogram: Histogram, number: Tensor) -> Tensor:
    """The magnitude beyond which `number` (R, 2) of the positive and of the negative values lie, float64 `(R, 2)`.

    Interpolated inside bins, never beyond the extremes; 0 where there are no more values than that.
    """
    counts, left, right = histogram.bins()
    up_to = counts.cumsum(2)
    rank = up_to[..., -1:] - number[..., None].double()
    index = torch.searchsorted(up_to, rank.clamp(min=0)).clamp_(max=up_to.shape[2] - 1)
    missing = (up_to.gather(2, index) - rank) / counts.gather(2, index).clamp(min=1)
    left, right = left.gather(2, index), right.gather(2, index)
    return (right - missing.clamp(0, 1) * (right - left)).where(rank > 0, 0).squeeze(2)


@register_observer("minmax")
class MinMaxObserver(Observer[MinMax]):
    """The range of all values: nothing is clipped."""

    def new_statistic(self) -> MinMax:
        return MinMax()

    def range_of(self, statistic: MinMax) -> Range:
        return statistic.range()


class MovingAverageOptions(Section):
    # For activations only: a weight is observed once. One that is computed in each forward has the default ratio.
    TARGETS: ClassVar[tuple[Target, ...]] = (ACTIVATION,)

    EMA_RATIO: float = Field(0.9, ge=0, lt=1, description="Weight of the past against the newest batch.")


@register_observer("moving_average", options=MovingAverageOptions)
class MovingAverageObserver(Observer[MovingMinMax]):
    """The moving average of every batch's extremes, with the weight EMA_RATIO of the past."""

    options: MovingAverageOptions

    def new_statistic(self) -> MovingMinMax:
        return MovingMinMax(self.options.EMA_RATIO)

    def range_of(self, statistic: MovingMinMax) -> Range:
        return statistic.range()


class PercentileOptions(Section):
    ALPHA: float = Field(0.001, ge=0, lt=0.5, description="Fraction of the values cut off at each end.")


@register_observer("percentile", options=PercentileOptions)
class PercentileObserver(HistogramObserver):
    """All but the fraction ALPHA of the values on either side of zero."""

    options: PercentileOptions

    def histogram_range(self, histogram: Histogram, rows: Tensor | None) -> Range:
        return percentile_range(histogram, self.options.ALPHA)


def ema_ratio(config: TensorConfig) -> float:
    """EMA_RATIO of a tensor's config, for any observer: ranges that follow the data in training use it too."""
    options = getattr(config.OBSERVER, "MOVING_AVERAGE", None)
    return options.EMA_RATIO if isinstance(options, MovingAverageOptions) else MovingAverageOptions().EMA_RATIO
