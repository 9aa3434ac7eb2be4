"""Smoothing: channels of inputs with large values are divided by a scale that the weight's columns are multiplied with.

Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models" (ICML 2023),
equation 4: `s = max|x|^alpha / max|W|^(1 - alpha)` for each channel. Here `alpha` is searched for each input, and no
scale at all is one of the candidates.

Legend: `X (rows, in)` inputs, `W (out, in)` a weight, `s (in,)` the scales. The loss is that of the outputs,
`||Q(X / s) Q(W s)^T - X W^T||^2`, relative to their size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparsebit.numerics.rounding.awq_math import ChannelScale

ALPHAS = tuple(step / 10 for step in range(1, 10))


def smoothing_scale(inputs: Tensor, weights: Tensor, alpha: float) -> Tensor:
    """The scale of each channel by its largest input and weight, `(channels,)`; 1 for a channel that is always zero."""
    is_used = (inputs > 0) & (weights > 0)
    inputs, weights = (torch.where(is_used, one, torch.ones_like(one)) for one in (inputs, weights))
    scale = inputs**alpha / weights ** (1 - alpha)
    if not bool(is_used.any()):
        return torch.ones_like(scale)
    used = scale[is_used]
    return torch.where(is_used, scale / (used.max() * used.min()).sqrt(), torch.ones_like(scale))


def search_smoothing(
    X: Tensor,
    num_extremes: int,
    weights: Sequence[Tensor],
    owner: Tensor,
    nearest: Sequence[Callable[[Tensor], Tensor]],
    rounded: Callable[[Tensor], Tensor],
) -> ChannelScale:
    """The scales of the channels that all `weights` read, with the smallest loss; of `alpha` 0: no scale.

    The last `num_extremes` rows of `X` hold its largest numbers: they count for ranges, and not for the loss.

    `owner (in,)`: the previous layer's channel that each input comes from; inputs of one channel share a scale.
    `nearest`: for each weight, a function that rounds a given weight; `rounded`: one that rounds given inputs.
    """
    largest = [X.abs().amax(0), torch.stack([W.abs().amax(0) for W in weights]).amax(0)]
    empty = torch.zeros(int(owner.max()) + 1, dtype=X.dtype, device=X.device)
    by_channel = [empty.scatter_reduce(0, owner, values, "amax") for values in largest]
    num_rows = len(X) - num_extremes
    outputs = [X[:num_rows] @ W.t() for W in weights]
    tried = []
    for alpha in (0.0, *ALPHAS):
        scale = smoothing_scale(by_channel[0], by_channel[1], alpha) if alpha else torch.ones_like(empty)
        s = scale[owner]
        x = rounded(X / s)[:num_rows]
        parts = zip(weights, nearest, outputs, strict=True)
        losses = (
            (x @ values(W * s).t() - Y).square().sum() / Y.square().sum().clamp(min=1e-30) for W, values, Y in parts
        )
        tried.append(ChannelScale(scale, alpha, float(sum(losses))))
    return min(tried, key=lambda found: found.loss)
