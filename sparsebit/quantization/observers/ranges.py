"""Ranges that are read off a statistic without a search: minmax, moving_average, percentile."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsebit.quantization.observers.observer import Observer, Range, over_histograms, register_observer
from sparsebit.quantization.observers.statistics import Histogram, MinMax, MovingMinMax, Samples


def percentile_range(histogram: Histogram, alpha: float) -> Range:
    """The `alpha` and `1 - alpha` quantiles of each row: interpolated inside bins, never beyond the extremes."""
    quantiles = [quantile(histogram, fraction) for fraction in (alpha, 1 - alpha)]
    return quantiles[0].clamp(max=0), quantiles[1].clamp(min=0)


def quantile(histogram: Histogram, fraction: float) -> Tensor:
    """The value that `fraction` of each row lies below, float64 `(R,)`. Zeros are a step of the distribution."""
    assert histogram.counts is not None
    counts, zeros = histogram.counts.double(), histogram.zeros.double()[:, None]
    bins = histogram.first_bin[:, None] + torch.arange(counts.shape[1], device=counts.device)
    rank = fraction * (counts.sum(1, keepdim=True) + zeros)
    negative = counts.where(bins < 0, 0).sum(1, keepdim=True)
    # The rank among the non-zero values; ranks of zeros end at the edge between negative and positive ones.
    rank_of_others = torch.where(rank > negative, (rank - zeros).maximum(negative), rank)
    at_or_below = counts.cumsum(1)
    index = torch.searchsorted(at_or_below, rank_of_others).clamp_(max=counts.shape[1] - 1)
    count = counts.gather(1, index)
    part = 1 - (at_or_below.gather(1, index) - rank_of_others) / count.clamp(min=1)
    value = (bins.gather(1, index) + part.clamp(0, 1)) * histogram.width[:, None]
    value = torch.where((rank >= negative) & (rank <= negative + zeros), 0.0, value)
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
    """All but the fraction `alpha` of the values at each end."""

    def new_statistic(self) -> Samples | Histogram:
        return Samples() if self.target == "weight" else Histogram()

    def range_of(self, statistic: Samples | Histogram) -> Range:
        return over_histograms(statistic, lambda histogram: percentile_range(histogram, self.options.alpha))
