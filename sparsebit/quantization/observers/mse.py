"""mse: the range with the least squared error, searched coarse to fine over all rows and candidates at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsebit.numerics.qparams import dequantized_range, qparams_from_range
from sparsebit.numerics.spec import PerTensor, TensorSpec
from sparsebit.quantization.observers import distortion as errors
from sparsebit.quantization.observers.distortion import Distortion, HistogramDistortion
from sparsebit.quantization.observers.histogram import Histogram
from sparsebit.quantization.observers.leveled_histogram import LeveledHistogram
from sparsebit.quantization.observers.observer import EVEN_STEPS, HistogramObserver, Range, register_observer
from sparsebit.quantization.observers.statistics import Samples, extremes

# Fractions of the extremes that are tried first: 1, RATIO, RATIO^2, ... 0.02.
NUM_COARSE = 32
RATIO = 0.02 ** (1 / (NUM_COARSE - 1))
# A refinement tries powers of RATIO^(1/FINER), then of RATIO^(1/FINER^2), ... around the best so far.
FINER_ONE_END, REFINEMENTS_ONE_END = 8, 2
FINER_TWO_ENDS, REFINEMENTS_TWO_ENDS = 3, 3


def mse_range(low: Tensor, high: Tensor, spec: TensorSpec, distortion: Distortion) -> Range:
    """The ends with the least distortion among ranges inside `[low, high]` (R,); never worse than `[low, high]` itself.

    Symmetric grids and one-sided rows have one parameter, a common fraction of both ends. Affine grids on
    two-sided rows have two: both ends shrink together, or one of them alone, then each varies around the best of these.
    """
    if spec.symmetric:
        low, high = dequantized_range(*qparams_from_range(low, high, spec), spec)
    low, high = low.clamp(max=0).double(), high.clamp(min=0).double()
    two_ends = not spec.symmetric and bool(((low < 0) & (high > 0)).any())
    powers = torch.arange(NUM_COARSE, device=low.device, dtype=torch.float64)
    none = torch.zeros_like(powers)
    # Candidates are exponents of RATIO for (low, high): (R or 1, candidates, 2).
    rays = [(powers, powers), (none, powers), (powers, none)] if two_ends else [(powers, powers)]
    best = _best(torch.cat([torch.stack(ray, -1) for ray in rays])[None], low, high, distortion)
    finer, refinements = (FINER_TWO_ENDS, REFINEMENTS_TWO_ENDS) if two_ends else (FINER_ONE_END, REFINEMENTS_ONE_END)
    offsets = torch.arange(-finer, finer + 1, device=low.device, dtype=torch.float64)
    around = torch.cartesian_prod(offsets, offsets) if two_ends else offsets[:, None].expand(-1, 2)
    for refinement in range(1, refinements + 1):
        best = _best((best[:, None] + around / finer**refinement).clamp(min=0), low, high, distortion)
    return low * RATIO ** best[:, 0], high * RATIO ** best[:, 1]


def _best(powers: Tensor, low: Tensor, high: Tensor, distortion: Distortion) -> Tensor:
    """The exponents (R, 2) with the least distortion; the first, hence widest, of equals."""
    fractions = RATIO**powers
    error = distortion(low[:, None] * fractions[..., 0], high[:, None] * fractions[..., 1])
    choice = error.argmin(1)
    return powers.expand(len(low), -1, -1)[torch.arange(len(low), device=low.device), choice]


@register_observer("mse")
class MseObserver(HistogramObserver):
    """Least squared error between values and quantized values; for weights, also of the outputs that they compute.

    For activations with one scale, samples that are far larger than nearly all others get a small weight: see
    `sparsebit.numerics.rounding.outlier_samples`.
    """

    FORMATS = EVEN_STEPS

    def new_statistic(self) -> Any:
        has_levels = self.target != "weight" and isinstance(self.spec.granularity, PerTensor)
        return LeveledHistogram() if has_levels else super().new_statistic()

    def _rows(self, x: Tensor) -> Tensor:
        return x if isinstance(self.statistic, LeveledHistogram) else super()._rows(x)

    def range_of(self, statistic: Any) -> Range:
        spec = self.spec
        if isinstance(statistic, LeveledHistogram):
            return mse_range(*statistic.extremes(), spec, HistogramDistortion(statistic.combined(), spec))
        if isinstance(statistic, Samples) and statistic.rows.shape[1] <= errors.LONGEST_SAMPLES:
            return mse_range(*extremes(statistic.rows), spec, errors.distortion_of_weights(statistic.rows, spec))
        return super().range_of(statistic)

    def histogram_range(self, histogram: Histogram, rows: Tensor | None) -> Range:
        return mse_range(histogram.low, histogram.high, self.spec, HistogramDistortion(histogram, self.spec))
