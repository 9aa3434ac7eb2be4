"""Ranges that are read off a statistic without a search: minmax, moving_average, percentile."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsebit.quantization.observers.observer import Observer, Range, over_histograms, register_observer
from sparsebit.quantization.observers.statistics import Histogram, MinMax, MovingMinMax, Samples


def percentile_range(histogram: Histogram, alpha: float) -> Range:
    """All but the fraction `alpha` of the negative values, and all but `alpha` of the others, `(R,)` each.

    So one-sided rows keep zero as their end, and skewed rows lose as much of their short side as of their long one.
    """
    assert histogram.counts is not None
    negative = histogram.counts.where(histogram.bins < 0, 0).sum(1).double()
    total = (histogram.counts.sum(1) + histogram.zeros).double()
    low = value_at(histogram, alpha * negative).clamp(max=0).where(negative > 0, 0)
    high = value_at(histogram, total - alpha * (total - negative)).clamp(min=0)
    return low, high


def value_at(histogram: Histogram, rank: Tensor) -> Tensor:
    """The value that `rank` (R,) values of each row lie below, float64 `(R,)`.

    Interpolated inside bins, never beyond the extremes. The zeros are one step between negative and positive bins.
    """
    assert histogram.counts is not None
    bins, counts, zeros = histogram.bins, histogram.counts.double(), histogram.zeros.double()[:, None]
    rank = rank[:, None].double()
    negative = counts.where(bins < 0, 0).sum(1, keepdim=True)
    # The same rank among the non-zero values: up to `negative` as it is, then without the zeros.
    rank_of_others = torch.where(rank > negative, (rank - zeros).maximum(negative), rank)
    up_to = counts.cumsum(1)
    index = torch.searchsorted(up_to, rank_of_others).clamp_(max=counts.shape[1] - 1)
    missing = (up_to.gather(1, index) - rank_of_others) / counts.gather(1, index).clamp(min=1)
    value = (bins.gather(1, index) + 1 - missing.clamp(0, 1)) * histogram.width[:, None]
    value = torch.where((rank >= negative) & (rank <= negative + zeros) & (zeros > 0), 0.0, value)
    return value.squeeze(1).clamp(histogram.low.double(), histogram.high.double())


@register_observer("minmax")
class MinMaxObserver(Observer[MinMax]):
    """All that was seen: nothing is clipped."""

    def new_statistic(self) -> MinMax:
        return MinMax()

    def range_of(self, statistic: MinMax) -> Range:
        return statistic.range()


@register_observer("moving_average")
class MovingAverageObserver(Observer[MovingMinMax]):
    """The moving average of every batch's extremes, with the weight `ema_ratio` of the past."""

    def new_statistic(self) -> MovingMinMax:
        return MovingMinMax(self.options.ema_ratio)

    def range_of(self, statistic: MovingMinMax) -> Range:
        return statistic.range()


@register_observer("percentile")
class PercentileObserver(Observer[Samples | Histogram]):
    """All but the fraction `alpha` of the values on either side of zero."""

    def new_statistic(self) -> Samples | Histogram:
        return Samples() if self.target == "weight" else Histogram()

    def range_of(self, statistic: Samples | Histogram) -> Range:
        return over_histograms(statistic, lambda histogram, _: percentile_range(histogram, self.options.alpha))
