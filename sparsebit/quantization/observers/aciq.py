"""aciq: the clipping that is optimal for a Gaussian or Laplace distribution with the data's moments.

Banner et al., "Post training 4-bit quantization of convolutional networks for rapid-deployment" (2019), section 3; here without its
approximations: the expected squared error is summed over the very grid of the spec, so that it holds from 1 to 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from sparsebit.numerics.spec import TensorSpec
from sparsebit.quantization.observers.distortion import HistogramDistortion
from sparsebit.quantization.observers.observer import Observer, Range, over_histograms, register_observer
from sparsebit.quantization.observers.statistics import Histogram, Samples

# Steps tried by the solver: a geometric grid, then finer ones around the best.
NUM_STEPS, NUM_ROUNDS = 64, 4


@dataclass(frozen=True)
class Distribution:
    """A distribution of spread 1 by what the error needs of it: mean, mean square, and `G(b)`, the mean of `max(b - x, 0)`."""

    mean: float
    mean_square: float
    below: Callable[[Tensor], Tensor]


def _gauss(b: Tensor) -> Tensor:
    return b * torch.special.ndtr(b) + torch.exp(-b.square() / 2) / math.sqrt(2 * math.pi)


def _laplace(b: Tensor) -> Tensor:
    return b.clamp(min=0) + torch.exp(-b.abs()) / 2


# For x about zero, and for |x|; the spread is the root mean square of GAUS and the mean of |x| of LAPLACE.
MODELS: dict[tuple[str, bool], Distribution] = {
    ("GAUS", False): Distribution(0.0, 1.0, _gauss),
    ("LAPLACE", False): Distribution(0.0, 2.0, _laplace),
    ("GAUS", True): Distribution(math.sqrt(2 / math.pi), 1.0, lambda b: _half(_gauss, b)),
    ("LAPLACE", True): Distribution(1.0, 2.0, lambda b: _half(_laplace, b)),
}


def _half(below: Callable[[Tensor], Tensor], b: Tensor) -> Tensor:
    """G of |x|: twice the part of G that comes from positive x."""
    b = b.clamp(min=0)
    return 2 * (below(b) - below(torch.zeros_like(b))) - b


@cache
def best_step(distribution: str, one_sided: bool, num_levels: int, first_level: float) -> float:
    """The step `s`, in spreads, of the grid `(first_level + k) * s`, `0 <= k < num_levels`, with the least expected squared error."""
    model = MODELS[distribution, one_sided]
    midpoints = first_level + 0.5 + torch.arange(num_levels - 1, dtype=torch.float64)
    last_level = first_level + num_levels - 1
    smallest, largest = 1e-2 / num_levels, 1e2 / num_levels
    step = torch.tensor([smallest])
    for _ in range(NUM_ROUNDS):
        steps = torch.logspace(math.log10(smallest), math.log10(largest), NUM_STEPS, dtype=torch.float64)
        top = steps * last_level
        gain = torch.stack([model.below(midpoints * s).sum() for s in steps])
        error = model.mean_square - 2 * top * model.mean + top.square() - 2 * steps * gain
        step = steps[error.argmin()]
        ratio = (largest / smallest) ** (1 / (NUM_STEPS - 1))
        smallest, largest = float(step) / ratio, float(step) * ratio
    return float(step)


def aciq_range(histogram: Histogram, spec: TensorSpec, distribution: str) -> Range:
    """The model's range where it fits the data better than no clipping does.

    Two models propose: the whole distribution (about the mean, or about zero for symmetric grids), and half of it about zero, as
    behind a ReLU. The data decide between them and `[low, high]` by the squared error. Zeros are left out, for no grid errs there.
    """
    low, high = histogram.low.double(), histogram.high.double()
    mean, spread, spread_about_zero = moments(histogram, distribution)
    half = _clip(histogram, spec, distribution, True, spread_about_zero, torch.zeros_like(mean))
    whole = (
        _clip(histogram, spec, distribution, False, spread_about_zero, torch.zeros_like(mean))
        if spec.symmetric
        else _clip(histogram, spec, distribution, False, spread, mean)
    )
    lows, highs = (torch.stack(ends, 1) for ends in zip((low, high), whole, half, strict=True))
    choice = HistogramDistortion(histogram, spec)(lows, highs).argmin(1, keepdim=True)
    return lows.gather(1, choice).squeeze(1), highs.gather(1, choice).squeeze(1)


def moments(histogram: Histogram, distribution: str) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, spread about the mean and spread about zero of the non-zero values of each row, float64 `(R,)`."""
    assert histogram.counts is not None
    counts = histogram.counts.double()
    weights = counts / counts.sum(1, keepdim=True).clamp(min=1)
    bins = histogram.first_bin[:, None] + torch.arange(counts.shape[1], device=counts.device)
    values = (bins + 0.5) * histogram.width[:, None]
    mean = (weights * values).sum(1)
    order = {"GAUS": 2, "LAPLACE": 1}[distribution]

    def spread(centre: Tensor) -> Tensor:
        return (weights * (values - centre[:, None]).abs().pow(order)).sum(1).pow(1 / order)

    return mean, spread(mean), spread(torch.zeros_like(mean))


def _clip(histogram: Histogram, spec: TensorSpec, distribution: str, one_sided: bool, spread: Tensor, centre: Tensor) -> Range:
    low, high = histogram.low.double(), histogram.high.double()
    levels = spec.num_levels
    if spec.symmetric:
        step = best_step(distribution, one_sided, levels, spec.qmin)
        ends = spec.qmin * step * spread, spec.qmax * step * spread
    elif one_sided:
        width = (levels - 1) * best_step(distribution, True, levels, 0) * spread
        ends = -width, width
    else:
        half_width = (levels - 1) / 2 * best_step(distribution, False, levels, -(levels - 1) / 2) * spread
        ends = centre - half_width, centre + half_width
    return ends[0].clamp(max=0).maximum(low), ends[1].clamp(min=0).minimum(high)


@register_observer("aciq")
class AciqObserver(Observer[Samples | Histogram]):
    """Analytical clipping for the distribution that the options name."""

    def new_statistic(self) -> Samples | Histogram:
        return Samples() if self.target == "weight" else Histogram()

    def range_of(self, statistic: Samples | Histogram) -> Range:
        return over_histograms(statistic, lambda histogram: aciq_range(histogram, self.spec, self.options.distribution))
