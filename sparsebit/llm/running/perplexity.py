"""Perplexity of a causal language model with the usual windowing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.graph.state.modes import evaluating
from sparsebit.llm.models.calibration_text import need_embeddings, need_positions
from sparsebit.progress import track


@dataclass(frozen=True)
class Perplexity:
    """`value = exp(mean negative log-likelihood)` over `num_predictions` tokens in `num_windows` windows."""

    value: float
    num_windows: int
    num_predictions: int


@torch.no_grad()
def perplexity(model: Any, windows: Tensor, *, batch_size: int = 4) -> Perplexity:
    """The perplexity of `model` on `windows (n, length)` of tokens; every window begins without context.

    Each token of a window except the first is predicted from those before it in the window. Logits become
    log-likelihoods in float32, sums are float64.
    """
    if windows.ndim != 2 or not len(windows) or windows.shape[1] < 2 or batch_size < 1:
        raise ConfigError(
            f"windows of shape {tuple(windows.shape)}, batch_size={batch_size}: allowed: (n, length) tokens, of length "
            "2 or more; batches of 1 or more"
        )
    need_embeddings(windows, model)
    need_positions(windows.shape[1], model)
    device, total = next(model.parameters()).device, 0.0
    with evaluating(model):
        for batch in track(windows.split(batch_size), "perplexity"):
            tokens = batch.to(device)
            logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
            losses = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")
            total += float(losses.double().sum())
    return mean_perplexity(total, windows)


def mean_perplexity(total: float, windows: Tensor) -> Perplexity:
    """`total`: the negative log-likelihood of all tokens of the windows except the first of each."""
    count = windows.shape[0] * (windows.shape[1] - 1)
    mean = total / count
    if not math.isfinite(mean):
        raise CalibrationError("the model's log-likelihoods are not finite; its weights have NaN or infinity")
    return Perplexity(math.exp(min(mean, 700.0)), windows.shape[0], count)
