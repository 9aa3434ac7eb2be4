"""Masks of minus infinity in front of a softmax."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.quantization.tiny import calibrated, qconfig, sites

Hide = Callable[[Tensor, Tensor], Tensor]
LOWEST = torch.finfo(torch.float32).min


def in_place(scores: Tensor, hidden: Tensor) -> Tensor:
    scores = scores * 1.0
    scores.masked_fill_(hidden, -math.inf)
    return scores


HIDE: dict[str, Hide] = {
    "masked_fill": lambda scores, hidden: scores.masked_fill(hidden, -math.inf),
    "in_place": in_place,
    "where": lambda scores, hidden: torch.where(hidden, -math.inf, scores),
    "added": lambda scores, hidden: scores + torch.zeros_like(scores).masked_fill(hidden, -math.inf),
    "lowest": lambda scores, hidden: scores.masked_fill(hidden, LOWEST),
    "multiplied": lambda scores, hidden: scores + hidden * LOWEST,
    "large": lambda scores, hidden: scores + hidden * -1e9,
    "triangle": lambda scores, hidden: scores + torch.full((4, 4), -math.inf).triu(1),
    "large triangle": lambda scores, hidden: scores + torch.full((4, 4), LOWEST).triu(1),
    "product of constants": lambda scores, hidden: scores + (1 - torch.ones(4, 4).tril()) * -1e4,
    "large where": lambda scores, hidden: torch.where(hidden, torch.tensor(-1e9), scores),
}


class Attention(nn.Module):
    def __init__(self, hide: Hide) -> None:
        super().__init__()
        self.q, self.k, self.v, self.hide = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), hide

    def forward(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.q(x) @ self.k(x).transpose(-2, -1) / 8**0.5
        weights = torch.softmax(self.hide(scores, hidden), -1)
        return weights, weights @ self.v(x)


class GivenMask(Attention):
    """The mask is an input: nobody knows its values before calibration."""

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.softmax(self.q(x) @ self.k(x).transpose(-2, -1) / 8**0.5 + mask, -1)
        return weights, weights @ self.v(x)


def hidden_pairs() -> Tensor:
    return torch.ones(4, 4, dtype=torch.bool).triu(1)


@pytest.mark.parametrize("adds", [False, True], ids=["", "adds"])
@pytest.mark.parametrize("asym", [False, True], ids=["", "asym"])
@pytest.mark.parametrize("name", HIDE)
def test_what_is_hidden_stays_hidden(name: str, asym: bool, adds: bool) -> None:
    torch.manual_seed(0)
    model, x, hidden = Attention(HIDE[name]).eval(), torch.randn(2, 4, 8), hidden_pairs()
    config = qconfig({"A.QADD.ENABLE_QUANT": adds})
    with torch.no_grad():
        qmodel = calibrated(model, [(x, hidden)], config, asym=asym)
        (weights, output), (expected_weights, expected) = qmodel(x, hidden), model(x, hidden)
    assert not bool(weights[..., hidden].any()) and "softmax.input" not in sites(qmodel)
    torch.testing.assert_close(weights, expected_weights, atol=0.02, rtol=0.1)
    torch.testing.assert_close(output, expected, atol=0.05, rtol=0.1)


@pytest.mark.parametrize("observer", ["minmax", "mse", "percentile", "moving_average", "kl_histogram"])
@pytest.mark.parametrize("adds", [False, True], ids=["", "adds"])
def test_a_mask_that_is_given(observer: str, adds: bool) -> None:
    torch.manual_seed(0)
    model, x, hidden = GivenMask(HIDE["added"]).eval(), torch.randn(2, 4, 8), hidden_pairs()
    mask = torch.zeros(4, 4).masked_fill(hidden, -math.inf)
    config = qconfig({"A.OBSERVER.TYPE": observer, "A.QADD.ENABLE_QUANT": adds})
    with torch.no_grad():
        qmodel = calibrated(model, [(x, torch.zeros(4, 4)), (x, mask)], config)
        weights, expected = qmodel(x, mask)[0], model(x, mask)[0]
    assert not bool(weights[..., hidden].any())
    torch.testing.assert_close(weights, expected, atol=0.02, rtol=0.1)
    reasons = {layer.name: layer.reason for layer in qmodel.coverage.float_layers}
    assert "a mask hides values" in reasons["softmax"]


class BufferedMask(Attention):
    def __init__(self, number: float) -> None:
        super().__init__(HIDE["added"])
        self.mask: Tensor
        self.register_buffer("mask", torch.full((6, 6), number).triu(1))

    def forward(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.softmax(self.q(x) @ self.k(x).transpose(-2, -1) / 8**0.5 + self.mask[:4, :4], -1)
        return weights, weights @ self.v(x)


@pytest.mark.parametrize("number", [-1e4, -1e9, LOWEST, -math.inf])
def test_a_mask_that_is_a_buffer(number: float) -> None:
    torch.manual_seed(0)
    model, x, hidden = BufferedMask(number).eval(), torch.randn(2, 4, 8), hidden_pairs()
    with torch.no_grad():
        qmodel = calibrated(model, [(x, hidden)], qconfig({"A.QADD.ENABLE_QUANT": True}))
        weights, expected = qmodel(x, hidden)[0], model(x, hidden)[0]
    assert not bool(weights[..., hidden].any()) and "softmax.input" not in sites(qmodel)
    torch.testing.assert_close(weights, expected, atol=0.02, rtol=0.1)


class Biased(Attention):
    """What is added in front of the softmax comes from layers: it has a grid."""

    def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.softmax(self.q(x) @ self.k(x).transpose(-2, -1) + self.v(other)[..., :4], -1)
        return weights, weights @ other


GIVEN: dict[str, Hide] = {
    "added": lambda scores, mask: scores + mask,
    "in place": lambda scores, mask: (scores * 1).add_(mask),
    "subtracted": lambda scores, mask: scores - -mask,
    "of a larger batch": lambda scores, mask: (scores.unsqueeze(1) + mask[None, None]).squeeze(1),
    "scaled": lambda scores, mask: (scores + mask) * 1.5,
    "logarithm": lambda scores, mask: scores + mask.exp().log(),
    "cast": lambda scores, mask: scores + mask.to(scores.dtype).unsqueeze(0),
}


@pytest.mark.parametrize("adds", [False, True], ids=["", "adds"])
@pytest.mark.parametrize("name", GIVEN)
def test_a_given_mask_hides_though_calibration_has_not_seen_it(name: str, adds: bool) -> None:
    torch.manual_seed(0)
    model, x, hidden = Attention(GIVEN[name]).eval(), torch.randn(2, 4, 8), hidden_pairs()
    mask = torch.zeros(4, 4).masked_fill(hidden, -math.inf)
    with torch.no_grad():
        qmodel = calibrated(model, [(x, torch.zeros(4, 4))], qconfig({"A.QADD.ENABLE_QUANT": adds}))
        weights, expected = qmodel(x, mask)[0], model(x, mask)[0]
    assert not bool(weights[..., hidden].any()) and "softmax.input" not in sites(qmodel)
    torch.testing.assert_close(weights, expected, atol=0.02, rtol=0.1)


def test_a_mask_of_torchs_attention_hides_though_calibration_has_not_seen_it() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            output: Tensor = self.attention(x, x, x, attn_mask=mask)[0]
            return output

    torch.manual_seed(0)
    model, x = Attends().eval(), torch.randn(2, 4, 8)
    mask = torch.zeros(4, 4).masked_fill(hidden_pairs(), -math.inf)
    with torch.no_grad():
        qmodel = calibrated(model, [(x, torch.zeros(4, 4))], qconfig({"A.QADD.ENABLE_QUANT": True}))
        other = x.clone()
        other[:, 3] += 1  # which the first three must not see
        torch.testing.assert_close(qmodel(other, mask)[:, :3], qmodel(x, mask)[:, :3], rtol=0, atol=0)


@pytest.mark.parametrize("adds", [False, True], ids=["", "adds"])
def test_an_activation_in_front_of_a_softmax_is_quantized(adds: bool) -> None:
    model, x = Biased(GIVEN["added"]).eval(), torch.randn(2, 4, 8)
    qmodel = calibrated(model, [(x, x)], qconfig({"A.QADD.ENABLE_QUANT": adds}))
    assert "softmax.input" in sites(qmodel)
