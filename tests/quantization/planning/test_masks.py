"""Masks of minus infinity in front of a softmax."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sparsebit.quantization import QuantModel
from sparsebit.quantization.planning.float_reasons import HIDDEN
from tests.quantization.tiny import calibrated, qconfig, sites

Hide = Callable[[Tensor, Tensor], Tensor]
LOWEST = torch.finfo(torch.float32).min


def in_place(scores: Tensor, hidden: Tensor) -> Tensor:
    scores = scores * 1.0
    scores.masked_fill_(hidden, -math.inf)
    return scores


def lowest_of(x: Tensor) -> float:
    return torch.finfo(x.dtype).min


def joined(scores: Tensor, hidden: Tensor) -> Tensor:
    """A column beside the scores, and the maximum taken off, before and behind the mask's numbers."""
    scores = torch.cat([scores.masked_fill(hidden, lowest_of(scores)), torch.ones_like(scores[..., :1])], -1)
    scores = scores - scores.max(dim=-1, keepdim=True).values
    return scores[..., :-1]


HIDE: dict[str, Hide] = {
    "finfo": lambda scores, hidden: scores.masked_fill(hidden, lowest_of(scores)),
    "largest": lambda scores, hidden: scores.masked_fill(hidden, -torch.finfo(scores.dtype).max),
    "half": lambda scores, hidden: scores.masked_fill(hidden, lowest_of(scores) / 2),
    "full": lambda scores, hidden: torch.where(hidden, torch.full([], lowest_of(scores), dtype=scores.dtype), scores),
    "sum": lambda scores, hidden: scores + torch.zeros_like(scores).masked_fill(hidden, lowest_of(scores)),
    "clamp": lambda scores, hidden: (scores + hidden.float() * lowest_of(scores)).clamp(min=lowest_of(scores)),
    "maximum": lambda scores, hidden: torch.max(
        scores.masked_fill(hidden, lowest_of(scores)), torch.tensor(lowest_of(scores))
    ),
    "expanded": lambda scores, hidden: scores + torch.full((1, 1), lowest_of(scores)).expand(4, 4).triu(1),
    "positive": lambda scores, hidden: scores - hidden * torch.finfo(scores.dtype).max,
    "computed": lambda scores, hidden: scores - 10.0 ** (hidden.float() * 9),
    "of a tensor": lambda scores, hidden: torch.where(hidden, -(scores.abs().max() + 1) * 1e6, scores),
    "joined": joined,
    "hundred": lambda scores, hidden: scores + torch.zeros_like(scores).masked_fill(hidden, -100.0),
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


@pytest.mark.parametrize("name", ["finfo", "half", "full", "sum", "clamp", "maximum", "positive", "joined"])
def test_numbers_of_a_type_hide_though_calibration_has_not_seen_them(name: str) -> None:
    model, x, hidden = Attention(HIDE[name]).eval(), torch.randn(2, 4, 8), hidden_pairs()
    with torch.no_grad():
        qmodel = calibrated(model, [(x, torch.zeros_like(hidden))], qconfig({"A.QADD.ENABLE_QUANT": True}))
        weights, expected = qmodel(x, hidden)[0], model(x, hidden)[0]
    torch.testing.assert_close(weights, expected, atol=0.05, rtol=0.2)


@pytest.mark.parametrize("name", ["finfo", "computed", "joined"])
def test_16_bits(name: str) -> None:
    model, x, hidden = Attention(HIDE[name]).eval(), torch.randn(2, 4, 8), hidden_pairs()
    with torch.no_grad():
        qmodel = calibrated(model, [(x, hidden)], qconfig({"A.QADD.ENABLE_QUANT": True}, bits=16))
        torch.testing.assert_close(qmodel(x, hidden), model(x, hidden), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("observer", ["minmax", "mse", "percentile", "moving_average", "kl_histogram", "aciq"])
def test_every_observer(observer: str, caplog: pytest.LogCaptureFixture) -> None:
    model, x, hidden = Attention(HIDE["of a tensor"]).eval(), torch.randn(2, 4, 8), hidden_pairs()
    with torch.no_grad():
        qmodel = calibrated(model, [(x, hidden)], qconfig({"A.OBSERVER.TYPE": observer}))
        weights, expected = qmodel(x, hidden)[0], model(x, hidden)[0]
    assert not bool(weights[..., hidden].any())
    torch.testing.assert_close(weights, expected, atol=0.05, rtol=0.2)
    assert "1 sites stay float" in caplog.text and "softmax.input: values from" in caplog.text
    reasons = {layer.name: layer.reason for layer in qmodel.coverage.float_layers}
    assert "numbers of a mask" in reasons["softmax"]
    again = QuantModel(model, qmodel.config)
    again.load_state_dict(qmodel.state_dict())
    again.eval().set_quant(w_quant=True, a_quant=True)
    with torch.no_grad():
        torch.testing.assert_close(again(x, hidden)[0], weights)


def test_ordinary_values_between_far_limits_have_a_grid() -> None:
    class Limited(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            x = torch.clamp(x, -torch.finfo(x.dtype).max + 1000, torch.finfo(x.dtype).max - 1000)
            return self.second(torch.max(x, torch.tensor(torch.finfo(x.dtype).min)))

    qmodel = calibrated(Limited().eval(), [torch.randn(4, 8)])
    assert "second.input" in sites(qmodel) and HIDDEN not in qmodel.plan.floats.values()


@pytest.mark.parametrize("backend", ["virtual", "onnxruntime", "openvino", "tensorrt"])
@pytest.mark.parametrize("number", [3000.0, 1e6])
def test_the_input_of_a_layer(number: float, backend: str, caplog: pytest.LogCaptureFixture) -> None:
    """An outlier that data may have is on the grid; one of 100,000 times all others stays float, with a warning."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).eval(), torch.randn(64, 8)
    x[3, 2] = number
    with torch.no_grad():
        qmodel = calibrated(model, [x], qconfig(backend=backend))
        difference = (qmodel(x) - model(x))[4:].abs().max()
    assert ("0.input" in sites(qmodel)) == (number < 1e4)
    assert ("0.input: values from" in caplog.text) == (number > 1e4)
    assert bool(difference < 0.1) == (number > 1e4)


class GivenMask(Attention):
    """The mask is an input: nobody knows its values before calibration."""

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.softmax(self.q(x) @ self.k(x).transpose(-2, -1) / 8**0.5 + mask, -1)
        return weights, weights @ self.v(x)


def hidden_pairs() -> Tensor:
    return torch.ones(4, 4, dtype=torch.bool).triu(1)


@pytest.mark.sample(13)
@pytest.mark.parametrize(("adds", "asym"), [(False, False), (True, True)], ids=["", "adds, asym"])
@pytest.mark.parametrize("name", HIDE)
def test_what_is_hidden_stays_hidden(name: str, asym: bool, adds: bool) -> None:
    torch.manual_seed(0)
    model, x, hidden = Attention(HIDE[name]).eval(), torch.randn(2, 4, 8), hidden_pairs()
    config = qconfig({"A.QADD.ENABLE_QUANT": adds})
    with torch.no_grad():
        qmodel = calibrated(model, [(x, hidden)], config, asym=asym)
        (weights, output), (expected_weights, expected) = qmodel(x, hidden), model(x, hidden)
    assert float(weights[..., hidden].max()) < 1e-30 and "softmax.input" not in sites(qmodel)
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


UNSEEN: dict[str, Callable[[Tensor, Tensor, nn.Module], Tensor]] = {
    "a positive number": lambda scores, seen, _: scores + (seen.float() - 1) * 10000,
    "a small number": lambda scores, seen, _: scores + (seen.float() - 1) * 1000,
    "filled with a small number": lambda scores, seen, _: scores.masked_fill(~seen, -100.0),
    "a mask of a small number": lambda scores, seen, _: scores + torch.zeros(4, 4).masked_fill(~seen, -100.0),
    "a positive buffer": lambda scores, seen, model: scores - (1 - seen.float()) * model.large,
    "a parameter": lambda scores, seen, model: torch.where(seen, scores, model.lowest),
    "a comparison": lambda scores, seen, _: scores - (seen.float() < 0.5).float() * 1000,
}


class Padded(Attention):
    def __init__(self, name: str) -> None:
        super().__init__(HIDE["added"])
        self.hides = UNSEEN[name]
        self.register_buffer("large", torch.tensor(1e9))
        self.lowest = nn.Parameter(torch.tensor(-1e9), requires_grad=False)

    def forward(self, x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.softmax(self.hides(self.q(x) @ self.k(x).transpose(-2, -1), seen, self), -1)
        return weights, weights @ self.v(x)


@pytest.mark.parametrize("name", UNSEEN)
@torch.no_grad()
def test_a_mask_hides_though_calibration_has_seen_no_padding(name: str) -> None:
    torch.manual_seed(0)
    model, x, hidden = Padded(name).eval(), torch.randn(2, 4, 8), hidden_pairs()
    for adds in (False, True):
        config = qconfig({"A.QADD.ENABLE_QUANT": adds})
        qmodel = calibrated(model, [(x, torch.ones(4, 4, dtype=torch.bool))], config)
        weights, expected = qmodel(x, ~hidden)[0], model(x, ~hidden)[0]
        assert float(weights[..., hidden].max()) < 1e-6
        torch.testing.assert_close(weights, expected, atol=0.03, rtol=0.1)


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
