"""aciq: clipping that is optimal for a Gaussian or Laplace distribution with the data's moments.

Banner et al., "Post training 4-bit quantization of convolutional networks for rapid-deployment" (2019), section 3,
without its approximations: the expected error is summed over the actual levels of the grid, from 1 to 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from sparsebit.config.fields import OneOf
from sparsebit.config.section import Section
from sparsebit.numerics.spec import TensorSpec
from sparsebit.quantization.observers.distortion import Distortion, distortion_of
from sparsebit.quantization.observers.histogram import Histogram
from sparsebit.quantization.observers.observer import EVEN_STEPS, HistogramObserver, Range, register_observer

# Steps that the solver tries: in equal ratios, then as many around the best of them, repeatedly.
NUM_STEPS, NUM_ROUNDS = 32, 4


def aciq_range(histogram: Histogram, spec: TensorSpec, distribution: str, distortion: Distortion) -> Range:
    """The range of the best distribution model, or no clipping if that fits the data better, `(R,)` each.

    Two models propose a range: the whole distribution (about the mean; about zero for symmetric grids) and half of one
    about zero, as after a ReLU. Real activations often follow neither, and then a clip at 4 sigma has up to 90 times
    the error of no clipping (EfficientNet-Lite0). So the data choose between the two and `[low, high]` by their
    `distortion`.
    """
    mean, about_mean, about_zero = moments(histogram, distribution)
    extremes = histogram.low.double(), histogram.high.double()
    num_levels = spec.num_levels
    if spec.symmetric:
        steps = [best_step(distribution, one_sided, num_levels, spec.qmin) for one_sided in (False, True)]
        whole, half = ((spec.qmin * step * about_zero, spec.qmax * step * about_zero) for step in steps)
    else:
        middle = (num_levels - 1) / 2
        reach = middle * best_step(distribution, False, num_levels, -middle) * about_mean
        whole = mean - reach, mean + reach
        reach = (num_levels - 1) * best_step(distribution, True, num_levels, 0) * about_zero
        half = -reach, reach
    lows = torch.stack([extremes[0], *(low.clamp(max=0).maximum(extremes[0]) for low, _ in (whole, half))], 1)
    highs = torch.stack([extremes[1], *(high.clamp(min=0).minimum(extremes[1]) for _, high in (whole, half))], 1)
    choice = distortion(lows, highs).argmin(1, keepdim=True)
    return lows.gather(1, choice).squeeze(1), highs.gather(1, choice).squeeze(1)


def moments(histogram: Histogram, distribution: str) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's mean, spread about the mean, and spread about zero, float64 `(R,)`. Zeros do not count: grids have 0.

    The spread is the distribution's scale parameter: root mean square for GAUS, mean absolute value for LAPLACE.
    """
    counts, left, right = histogram.bins()
    weights = counts.flatten(1) / counts.sum((1, 2))[:, None].clamp(min=1)
    positive, negative = ((left + right) / 2).unbind(1)
    values = torch.cat([positive, -negative], 1)
    mean = (weights * values).sum(1)
    power = {"GAUS": 2, "LAPLACE": 1}[distribution]
    about_mean, about_zero = (
        (weights * (values - centre).abs().pow(power)).sum(1).pow(1 / power) for centre in (mean[:, None], 0.0)
    )
    return mean, about_mean, about_zero


@cache
def best_step(distribution: str, one_sided: bool, num_levels: int, first_level: float) -> float:
    """The step `s` of the grid `(first_level + k) * s`, `k < num_levels`, with the least expected squared error.

    For a distribution of spread 1, whole or (`one_sided`) of its absolute values. The error is that of
    `distortion.HistogramDistortion`, with the expectation of the model instead of the sum over the data.
    """
    model = MODELS[distribution, one_sided]
    midpoints = first_level + 0.5 + torch.arange(num_levels - 1, dtype=torch.float64)
    smallest, largest = 0.01 / num_levels, 100 / num_levels
    for _ in range(NUM_ROUNDS):
        ratio = (largest / smallest) ** (1 / (NUM_STEPS - 1))
        steps = smallest * ratio ** torch.arange(NUM_STEPS, dtype=torch.float64)
        below = torch.stack([model.below(midpoints * step).sum() for step in steps])
        top = steps * (first_level + num_levels - 1)
        error = model.mean_square - 2 * top * model.mean + top.square() - 2 * steps * below
        best = float(steps[error.argmin()])
        smallest, largest = best / ratio, best * ratio
    return math.sqrt(smallest * largest)


class Model(NamedTuple):
    """A distribution of spread 1, as far as the error needs it; `below(b)` is the mean of `max(b - x, 0)`."""

    mean: float
    mean_square: float
    below: Callable[[Tensor], Tensor]


def _below_gauss(b: Tensor) -> Tensor:
    return b * (1 + torch.erf(b / math.sqrt(2))) / 2 + torch.exp(-b.square() / 2) / math.sqrt(2 * math.pi)


def _below_laplace(b: Tensor) -> Tensor:
    return b.clamp(min=0) + torch.exp(-b.abs()) / 2


def _below_absolute(below: Callable[[Tensor], Tensor], b: Tensor) -> Tensor:
    """The same for `|x|`: twice the share of the positive `x`."""
    b = b.clamp(min=0)
    return 2 * (below(b) - below(torch.zeros_like(b))) - b


# By distribution and whether it is of absolute values.
MODELS = {
    ("GAUS", False): Model(0.0, 1.0, _below_gauss),
    ("GAUS", True): Model(math.sqrt(2 / math.pi), 1.0, partial(_below_absolute, _below_gauss)),
    ("LAPLACE", False): Model(0.0, 2.0, _below_laplace),
    ("LAPLACE", True): Model(1.0, 2.0, partial(_below_absolute, _below_laplace)),
}


class AciqOptions(Section):
    DISTRIBUTION: Annotated[str, OneOf.fixed("GAUS", "LAPLACE", canonical=str.upper)] = Field(
        "GAUS", description="The shape that the values are taken to have."
    )


@register_observer("aciq", options=AciqOptions)
class AciqObserver(HistogramObserver):
    """Analytical clipping for the distribution in the options."""

    FORMATS = EVEN_STEPS
    options: AciqOptions

    def histogram_range(self, histogram: Histogram, rows: Tensor | None) -> Range:
        distortion = distortion_of(histogram, rows, self.spec)
        return aciq_range(histogram, self.spec, self.options.DISTRIBUTION, distortion)
