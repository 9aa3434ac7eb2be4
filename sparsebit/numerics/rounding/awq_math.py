"""Activation-aware scales: columns of a weight that read large inputs are scaled up before it is rounded.

Lin et al., "AWQ: Activation-aware Weight Quantization for On-Device LLM Compression and Acceleration" (MLSys 2024),
section 3.2: `W x = (W diag(s)) (diag(s)^-1 x)`, with `s = m^alpha` for the magnitudes `m` of the inputs (equation 5),
and `alpha` the best of a grid from 0 to 1. Rounding errors of a scaled column are divided by its scale again.

Legend: `W (out, in)` a weight, `H (in, in)` the second moments of its input, `s (in,)` the scales, `E` the error of the
weight from rounding. The loss is that of the layer's output, `tr(E H E^T)`, relative to its energy `tr(W H W^T)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_ALPHAS = 20


@dataclass(frozen=True)
class ChannelScale:
    """`scale (channels,)`, that of `alpha`; `loss`: summed over the layers."""

    scale: Tensor
    alpha: float
    loss: float


def channel_scale(magnitudes: Tensor, alpha: float) -> Tensor:
    """`m^alpha`, scaled so that the largest times the smallest is 1; a channel that is always zero has the scale 1."""
    is_used = magnitudes > 0
    scale = torch.where(is_used, magnitudes, torch.ones_like(magnitudes)) ** alpha
    if not bool(is_used.any()):
        return torch.ones_like(magnitudes)
    used = scale[is_used]
    return torch.where(is_used, scale / (used.max() * used.min()).sqrt(), torch.ones_like(scale))


def search_channel_scale(
    weights: Sequence[Tensor],
    H: Tensor,
    owner: Tensor,
    nearest: Sequence[Callable[[Tensor], Tensor]],
    num_alphas: int = NUM_ALPHAS,
) -> ChannelScale:
    """The scales of the channels that all `weights` read, with the smallest loss of these.

    `owner (in,)`: the previous layer's channel that each input comes from; inputs of one channel share a scale.
    `nearest`: for each weight, a function that rounds a given weight to the nearest values of its grid.
    """
    num_channels = int(owner.max()) + 1
    counts = torch.bincount(owner, minlength=num_channels).clamp(min=1)
    moments = torch.zeros(num_channels, dtype=H.dtype, device=H.device).index_add(0, owner, H.diagonal()) / counts
    magnitudes = moments.clamp(min=0).sqrt().float()
    energies = [_loss(W, H) for W in weights]
    tried = []
    for alpha in (number / num_alphas for number in range(num_alphas)):
        scale = channel_scale(magnitudes, alpha)
        s = scale[owner]
        parts = zip(weights, nearest, energies, strict=True)
        loss = sum(_loss(values(W * s) / s - W, H) / max(energy, 1e-30) for W, values, energy in parts)
        tried.append(ChannelScale(scale, alpha, loss))
    return min(tried, key=lambda found: found.loss)


def _loss(E: Tensor, H: Tensor) -> float:
    return float(((E @ H.to(E)) * E).sum())
