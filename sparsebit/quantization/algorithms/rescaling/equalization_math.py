"""Cross-layer equalization: a factor per channel that makes the weights on both sides of it equally large.

Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction" (2019), section 4.1. A
positively homogeneous function (`f(s x) = s f(x)` for `s > 0`) between two layers lets a channel be divided by `s`
before it and multiplied after it: `W2 f(W1 x + b) = (W2 S) f(S^-1 W1 x + S^-1 b)`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def equalizing_scale(made: Tensor, read: Tensor) -> Tensor:
    """`s = sqrt(p1 / p2)` with `p = r / max r`: afterwards both sides use `sqrt(p1 p2)` of their range.

    `made`, `read`: the largest weight `r` of each channel, before and after, `(channels,)`. This is equation 11 up
    to one factor for all channels, which the equation leaves open. Here it keeps both ranges as they are, so that
    channels which must keep their scale keep their size relative to the others. A channel that is zero on one side has
    nothing to equalize.
    """
    is_used = (made > 0) & (read > 0)
    one = torch.ones_like(made)
    ratio = torch.where(is_used, made, one) / torch.where(is_used, read, one)
    gauge = read.max() / made.max() if bool(is_used.any()) else one.mean()
    return torch.where(is_used, (ratio * gauge).sqrt(), one)


def precision(made: Tensor, read: Tensor) -> float:
    """How much of both ranges the channels use, `mean(p1 p2)` (equation 9): 1 where all are equally large."""
    if not made.max() > 0 or not read.max() > 0:
        return 1.0
    return float(((made / made.max()) * (read / read.max())).mean())


def absorbed_bias(lowest: Tensor) -> Tensor:
    """The part of each channel's values that is always present and can move to the next layer's bias (section 4.1.3).

    `lowest`: the smallest value of each channel after the activation, on data, `(channels,)`. The paper takes
    `max(0, mean - 3 std)`, which changes the model's output for values below it; the smallest value does not.
    """
    return lowest.clamp_min(0)
