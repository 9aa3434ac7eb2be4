"""What language models are judged by, against the definitions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sparsebit.compress.language.metrics import divergence, log_likelihood, read_language_metric
from sparsebit.errors import ConfigError


def outputs(seed: int) -> SimpleNamespace:
    return SimpleNamespace(logits=torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(seed)))


def test_the_likelihood_is_that_of_the_next_tokens() -> None:
    tokens = torch.randint(0, 7, (2, 5), generator=torch.Generator().manual_seed(3))
    found, logits = log_likelihood(outputs(0), {"input_ids": tokens}, None), outputs(0).logits
    for row in range(2):
        chances = [logits[row, place].softmax(-1)[tokens[row, place + 1]] for place in range(4)]
        assert float(found[row]) == pytest.approx(100 * float(torch.stack(chances).log().mean()), rel=1e-5)


def test_the_divergence_is_from_the_float_model() -> None:
    ours, theirs = outputs(0), outputs(1)
    p, q = (one.logits[:, :-1].softmax(-1) for one in (theirs, ours))
    wanted = -100 * (p * (p / q).log()).sum(-1).mean(1)
    assert divergence(ours, {}, theirs).tolist() == pytest.approx(wanted.tolist(), rel=1e-4)
    assert divergence(ours, {}, ours).abs().max() < 1e-6


def test_names() -> None:
    assert read_language_metric(None).name == "perplexity"
    assert read_language_metric("KL").needs_reference
    with pytest.raises(ConfigError, match="perplexity, kl"):
        read_language_metric("accuracy")
