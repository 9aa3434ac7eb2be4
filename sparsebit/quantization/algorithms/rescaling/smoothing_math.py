"""Smoothing: a factor per channel that moves the difficulty of quantization from activations to weights.

Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models" (2023),
section 4: `X W^T = (X S^-1) (W S)^T` with `s_j = max|X_j|^alpha / max|W_j|^(1 - alpha)` (equation 4).

With one power for all channels, a channel that is far larger than all others stays the largest by far. Wei et al.,
"Outlier Suppression+: Accurate quantization of large language models by equivalent and effective shifting and scaling"
(2023), section 4.2: `s_j = max(1, max|X_j| / t)`, with `t` searched: only channels above `t` are scaled. Both are
combined here.
"""

from __future__ import annotations

import torch
from torch import Tensor


def smoothing_scale(inputs: Tensor, weights: Tensor, alpha: float, largest: float) -> Tensor:
    """`s = inputs^alpha / weights^(1 - alpha)`, with a geometric mean of 1, `(channels,)`.

    `inputs`, `weights`: how large each channel of the activation and of the weights that read it is. A channel with
    zeros only keeps its scale. `s` is clamped to `[1 / largest, largest]`.
    """
    is_used = (inputs > 0) & (weights > 0)
    one = torch.ones_like(inputs)
    scale = torch.where(is_used, inputs, one) ** alpha / torch.where(is_used, weights, one) ** (1 - alpha)
    mean = scale[is_used].log().mean().exp() if bool(is_used.any()) else one.mean()
    return torch.where(is_used, scale / mean, one).clamp(1 / largest, largest)


def capped_scale(scale: Tensor, inputs: Tensor, cap: float, largest: float) -> Tensor:
    """The scale, larger where a channel of `inputs / scale` is above `cap` times the largest one, `(channels,)`.

    >>> capped_scale(torch.ones(3), torch.tensor([1.0, 4.0, 16.0]), 0.25, 1000)
    tensor([1., 1., 4.])
    """
    limit = cap * (inputs / scale).amax()
    return torch.maximum(scale, inputs / limit).clamp(max=largest) if float(limit) > 0 else scale


def relative_error(outputs: Tensor, targets: Tensor, *, per_row: bool) -> float:
    """The squared error relative to the targets: of all values, or the mean over rows of each row's own.

    Rows are tokens. A few of them are far larger than all others, and a later norm makes them equal again.
    """
    error, power = (outputs - targets).double().square(), targets.double().square()
    if not per_row:
        return float(error.sum() / power.sum().clamp_min(torch.finfo(torch.float32).tiny))
    error, power = error.reshape(-1, error.shape[-1]).sum(-1), power.reshape(-1, power.shape[-1]).sum(-1)
    floor = 1e-3 * power.mean() + torch.finfo(torch.float32).tiny  # ignores rows of (nearly) zeros
    return float((error / (power + floor)).mean())
