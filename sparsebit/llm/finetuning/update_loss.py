"""`measure_loss`: the share of an adapter's effect on the next token that a merged model has lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Below this divergence, in nats, rounding of sums exceeds the effect of the adapter.
_LEAST = 1e-9
_POSITIONS = 64  # positions whose distributions are in memory in float64 at a time


@dataclass(frozen=True)
class UpdateLoss:
    """The distance of a merged model from the model with its adapter, on the same tokens.

    `logit_error`: root mean square, relative. `divergence`: `KL(adapted || merged)` of the distributions of the next
    token, mean, in nats. `effect`: `KL(adapted || base)`, the divergence of the model without its adapter.
    """

    logit_error: float
    divergence: float
    effect: float

    @property
    def share(self) -> float | None:
        """0: the merged model predicts as with the adapter; 1: as without it. None: the adapter has no effect."""
        return None if self.effect < _LEAST else self.divergence / self.effect


@torch.no_grad()
def measure_loss(adapted: Any, merged: Any, tokens: Tensor) -> UpdateLoss:
    """`adapted`: a model of peft, run with and without its adapter. `tokens (n, length)`: run one row at a time."""
    error = size = divergence = effect = 0.0
    for row in tokens.split(1):
        wanted, found = (model(input_ids=row, use_cache=False).logits[0] for model in (adapted, merged))
        with adapted.disable_adapter():
            plain = adapted(input_ids=row, use_cache=False).logits[0]
        for wanted_part, *others in zip(*(one.split(_POSITIONS) for one in (wanted, found, plain)), strict=True):
            expected = wanted_part.double()
            found_part, plain_part = (one.double() for one in others)
            error += float((found_part - expected).square().sum())
            size += float(expected.square().sum())
            divergence += _divergence(expected, found_part)
            effect += _divergence(expected, plain_part)
    count = tokens.numel()
    return UpdateLoss((error / max(size, 1e-30)) ** 0.5, divergence / count, effect / count)


def _divergence(expected: Tensor, found: Tensor) -> float:
    """Sum over rows of the Kullback-Leibler divergence of the distributions with these logits."""
    theirs, ours = expected.log_softmax(-1), found.log_softmax(-1)
    return float((theirs.exp() * (theirs - ours)).sum())
