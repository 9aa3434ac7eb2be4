"""`LearnedCodes`: the codes and the grid of a weight while they are learned, by one of three methods.

Soft rounding with a regularizer (AdaRound), bounded offsets (AutoRound) and latent weights (LSQ) with straight-through
gradients.

Legend: `W` the float weight, `s` its scale (in a form that broadcasts to `W`), `n` the code minus the zero point, so
that a weight's value is `s * n` with `low <= n <= high`; `u = W / s`; `v` the learned numbers, one for each weight;
`h` the share in [0, 1] by which a weight is rounded up; `progress` from 0 to 1 over the training.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

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
        if kind == "latent":  # whatever the latent weights began with, they alone decide
            self.original = self.lower = self.start = original.new_empty(0)
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
            return clipped_codes(self.v / self.begin.wide(scale / self.begin.scale), low, high)
        v = bounded_offset(self.v, self.start)
        return clipped_codes(self.original / self.begin.wide(scale) + v, low, high)

    def penalty(self, progress: float) -> Tensor | None:
        """The regularizer of soft rounding at a share of the training."""
        beta = annealed_beta(progress) if self.kind == "sigmoid" else None
        return None if beta is None else rounding_penalty(rectified_sigmoid(self.v), beta)


# The sigmoid is stretched beyond [0, 1], so that it reaches both ends (Louizos et al., 2018; AdaRound, eq. 23).
STRETCHED_TO, STRETCHED_FROM = 1.1, -0.1
# The smallest initial distance of a weight from halfway.
_MARGIN = 0.05
# The initial share of a weight's present code, if that is not the nearest one.
_AT_CODE = 0.9
# The largest initial distance of a latent weight from its present code.
_NEAR_HALF = 0.49


# --- AdaRound (Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization", ICML 2020, section 3.2)


def rectified_sigmoid(v: Tensor) -> Tensor:
    """`h(v) = clip(1.2 * sigmoid(v) - 0.1, 0, 1)`."""
    return (torch.sigmoid(v) * (STRETCHED_TO - STRETCHED_FROM) + STRETCHED_FROM).clamp(0, 1)


def inverse_rectified_sigmoid(h: Tensor) -> Tensor:
    """The `v` with `rectified_sigmoid(v) == h`; the ends are moved slightly inside, where there is a gradient."""
    inside = h.clamp(1e-3, 1 - 1e-3)
    return -torch.log((STRETCHED_TO - STRETCHED_FROM) / (inside - STRETCHED_FROM) - 1)


def soft_start(u: Tensor, n: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The lower of the two codes between which each weight is rounded, and the initial `v`.

    The two codes are those around `u`, or, if the present code `n` is neither (as after GPTQ), `n` and the one next
    to it on the side of `u`. The initial `v` makes the soft code equal to `u` if `u` rounds to `n`, and otherwise
    near `n`: the initial hard rounding is the present one.
    """
    lower = torch.minimum(torch.maximum(u.floor(), n - 1), n)
    lower = torch.minimum(torch.maximum(lower, low), high - 1)
    h = (u - lower).clamp(0, 1)
    is_up, is_nearest = n > lower, (h >= 0.5) == (n > lower)
    nearest = torch.where(is_up, h.clamp_min(0.5 + _MARGIN), h.clamp_max(0.5 - _MARGIN))
    h = torch.where(is_nearest, nearest, torch.where(is_up, _AT_CODE, 1 - _AT_CODE))
    return lower, inverse_rectified_sigmoid(h)


def rounding_penalty(h: Tensor, beta: float) -> Tensor:
    """`mean(1 - |2h - 1|^beta)`: 0 where every weight is rounded up or down, 1 where all are halfway (eq. 24)."""
    return 1 - (2 * h - 1).abs().pow(beta).mean()


def annealed_beta(progress: float) -> float | None:
    """The exponent of the penalty, by a cosine from 20 to 2; None in the first fifth, which has no penalty.

    A high exponent has no effect on weights that are not almost decided.
    """
    return None if progress < 0.2 else 2 + 9 * (1 + math.cos((progress - 0.2) / 0.8 * math.pi))


# --- AutoRound (Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent", EMNLP 2024, section 3)


def straight_through_round(x: Tensor) -> Tensor:
    """`round(x)` with the gradient of `x`."""
    return x + (x.round() - x).detach()


def offset_start(u: Tensor, n: Tensor) -> Tensor:
    """The offset for which `round(u + v)` is the present code `n`: 0 if `u` rounds to it, else the offset to `n`."""
    return torch.where(u.round() == n, torch.zeros_like(u), n - u)


def bounded_offset(v: Tensor, start: Tensor) -> Tensor:
    """`v` within [-0.5, 0.5], so that a weight gets one of the two codes around it, or as far as it started (eq. 3)."""
    return torch.minimum(torch.maximum(v, start.clamp_max(-0.5)), start.clamp_min(0.5))


def clipped_codes(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """`n = clip(round(x), low, high)`, straight-through."""
    return torch.minimum(torch.maximum(straight_through_round(x), low), high)


def clipped_grid(
    scale: Tensor, zero_point: Tensor, low_factor: Tensor, high_factor: Tensor, qmin: int, qmax: int
) -> tuple[Tensor, Tensor]:
    """Scale and zero point of a range whose ends are multiplied by factors; the zero point is whole (eq. 4).

    A symmetric grid is the case of equal factors: its zero point does not change.
    """
    low, high = (qmin - zero_point) * scale * low_factor, (qmax - zero_point) * scale * high_factor
    clipped = (high - low) / (qmax - qmin)
    return clipped, straight_through_round(qmin - low / clipped)


# --- latent weights (Esser et al., "Learned Step Size Quantization", ICLR 2020, section 2)


def latent_start(u: Tensor, n: Tensor) -> Tensor:
    """The initial latent weight: `u` if that rounds to the present code `n`, else the nearest number that does.

    It is at most 0.49 from `n`, so that the initial rounding is the present one.
    """
    return torch.minimum(torch.maximum(u, n - _NEAR_HALF), n + _NEAR_HALF)
