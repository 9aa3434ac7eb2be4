"""The metrics of language models: the likelihood of held-out text, and the divergence from the float model."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from sparsebit.compress.judging.metrics import PerSample
from sparsebit.errors import ConfigError


def log_likelihood(outputs: Any, batch: Any, reference: Any) -> Tensor:
    """The mean over a window's tokens, in hundredths of a nat: a loss of 1 is 1 % more perplexity."""
    del reference
    tokens = batch["input_ids"]
    losses = F.cross_entropy(outputs.logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return -100 * losses.view(len(tokens), -1).double().mean(1).cpu()


def divergence(outputs: Any, batch: Any, reference: Any) -> Tensor:
    """Minus the mean KL divergence of a token from the float model's distribution, in hundredths of a nat."""
    del batch
    ours, theirs = (found.logits[:, :-1].float().log_softmax(-1) for found in (outputs, reference))
    return -100 * F.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1).double().mean(1).cpu()


METRICS = {
    "perplexity": PerSample(log_likelihood, "perplexity", "% of perplexity"),
    "kl": PerSample(divergence, "KL to the float model", "hundredths of a nat", needs_reference=True),
}


def read_language_metric(given: Any) -> PerSample:
    """The metric of that name; perplexity if none is given."""
    if given is None:
        return METRICS["perplexity"]
    if not isinstance(given, str) or given.lower() not in METRICS:
        raise ConfigError(f"metric={given!r}: allowed for language models: {', '.join(METRICS)}")
    return METRICS[given.lower()]
