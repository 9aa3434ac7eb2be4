"""Learned rounding: soft rounding with a regularizer (AdaRound), bounded offsets (AutoRound) and latent weights (LSQ)
with straight-through gradients.

Legend: `W` the float weight, `s` its scale (in a form that broadcasts to `W`), `n` the code minus the zero point, so
that a weight's value is `s * n` with `low <= n <= high`; `u = W / s`; `v` the learned numbers, one for each weight;
`h` the share in [0, 1] by which a weight is rounded up; `progress` from 0 to 1 over the training.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# The sigmoid is stretched beyond [0, 1], so that it reaches both ends (Louizos et al., 2018; AdaRound, eq. 23).
STRETCHED_TO, STRETCHED_FROM = 1.1, -0.1
# The smallest initial distance of a weight from halfway.
_MARGIN = 0.05
# The share by which a weight starts at its present code, if that is not the nearest.
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


def annealed_beta(progress: float, warm_up: float = 0.2, first: float = 20.0, last: float = 2.0) -> float | None:
    """The exponent of the penalty, by a cosine from `first` to `last`; None in the warm-up, which has no penalty.

    A high exponent has no effect on weights that are not almost decided.
    """
    if progress < warm_up:
        return None
    done = (progress - warm_up) / max(1 - warm_up, 1e-9)
    return last + 0.5 * (first - last) * (1 + math.cos(min(done, 1.0) * math.pi))


# --- AutoRound (Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent", EMNLP 2024, section 3)


def straight_through_round(x: Tensor) -> Tensor:
    """`round(x)` with the gradient of `x`."""
    return x + (x.round() - x).detach()


def offset_start(u: Tensor, n: Tensor) -> Tensor:
    """The offset for which `round(u + v)` is the present code `n`: 0 if it is the nearest, else the offset to `n`."""
    return torch.where((u - n).abs() <= 0.5, torch.zeros_like(u), n - u)


def bounded_offset(v: Tensor, start: Tensor) -> Tensor:
    """`v` within [-0.5, 0.5], so that a weight gets one of the two codes around it, or as far as it started (eq. 3)."""
    return torch.minimum(torch.maximum(v, start.clamp_max(-0.5)), start.clamp_min(0.5))


def offset_codes(u: Tensor, v: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """`n = clip(round(u + v), low, high)`, straight-through for `u` and `v`."""
    return torch.minimum(torch.maximum(straight_through_round(u + v), low), high)


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


def latent_codes(latent: Tensor, factor: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """`n = clip(round(latent / factor), low, high)`, straight-through for both; `factor`: of the scale."""
    return torch.minimum(torch.maximum(straight_through_round(latent / factor), low), high)
