"""`LearnedCodes`: the codes and the grid of a weight while they are learned; the formulas are in `rounding_math.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sparsebit.numerics.rounding.learned_rounding_math import (
    annealed_beta,
    bounded_offset,
    clipped_grid,
    latent_codes,
    latent_start,
    offset_codes,
    offset_start,
    rectified_sigmoid,
    rounding_penalty,
    soft_start,
)

# "sigmoid": AdaRound's soft rounding; "sign": AutoRound's offsets; "latent": any code, by the gradient of the weight
# itself; "none": codes stay as they are.
RoundingKind = Literal["sigmoid", "sign", "latent", "none"]


@dataclass(frozen=True)
class StartGrid:
    """The grid that a weight has before it is learned. `wide`: broadcasts a tensor of the scale's shape to the weight.

    `smallest_scale`: a bound for the learned scale.
    """

    scale: Tensor
    zero_point: Tensor
    qmin: int
    qmax: int
    symmetric: bool
    wide: Callable[[Tensor], Tensor] = lambda number: number
    smallest_scale: Tensor | None = None


class LearnedCodes:
    """`original`: the float weight; `present`: its initial codes on `start`.

    The learned parameters are `v`, one number for each weight, and `factors` of the range's two ends, or one of the
    scale.
    """

    def __init__(
        self, original: Tensor, present: Tensor, start: StartGrid, kind: RoundingKind, *, learns_scale: bool
    ) -> None:
        self.original, self.begin, self.kind = original, start, kind
        wide_scale, wide_zero = start.wide(start.scale), start.wide(start.zero_point)
        n, u = present - wide_zero, original / wide_scale
        if kind == "sigmoid":
            self.lower, self.start = soft_start(u, n, start.qmin - wide_zero, start.qmax - wide_zero)
        else:
            self.lower, self.start = n, latent_start(u, n) if kind == "latent" else offset_start(u, n)
        self.v = self.start.clone().requires_grad_()
        count = 2 if kind in ("sign", "latent") and not start.symmetric else 1
        self.factors = [torch.ones_like(start.scale).requires_grad_(learns_scale) for _ in range(count)]

    def values(self) -> Tensor:
        """The current weight, with gradients for the learned parameters."""
        scale, zero_point = self.grid()
        return self.steps(scale, zero_point) * self.begin.wide(scale)

    def grid(self) -> tuple[Tensor, Tensor]:
        """The current scale and zero point."""
        begin = self.begin
        if len(self.factors) == 2:
            low, high = self.factors
            scale, zero_point = clipped_grid(begin.scale, begin.zero_point, low, high, begin.qmin, begin.qmax)
            zero_point = zero_point.clamp(begin.qmin, begin.qmax)
        else:
            scale, zero_point = begin.scale * self.factors[0], begin.zero_point
        return (scale if begin.smallest_scale is None else torch.maximum(scale, begin.smallest_scale)), zero_point

    def steps(self, scale: Tensor, zero_point: Tensor, *, hard: bool = False) -> Tensor:
        """Codes minus the zero point; `hard`: as whole numbers."""
        if self.kind == "none":
            return self.lower
        if self.kind == "sigmoid":
            h = rectified_sigmoid(self.v)
            return self.lower + ((h >= 0.5).to(h) if hard else h)
        wide = self.begin.wide(zero_point)
        low, high = self.begin.qmin - wide, self.begin.qmax - wide
        if self.kind == "latent":
            return latent_codes(self.v, self.begin.wide(scale / self.begin.scale), low, high)
        v = bounded_offset(self.v, self.start)
        return offset_codes(self.original / self.begin.wide(scale), v, low, high)

    def penalty(self, progress: float) -> Tensor | None:
        """The regularizer of soft rounding at a share of the training."""
        beta = annealed_beta(progress) if self.kind == "sigmoid" else None
        return None if beta is None else rounding_penalty(rectified_sigmoid(self.v), beta)
