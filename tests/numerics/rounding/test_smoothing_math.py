from __future__ import annotations

import torch

from sparsebit.numerics.rounding.smoothing_math import search_smoothing, smoothing_scale


def to_eight_bits(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return (x / scale).round() * scale


def test_the_scale_by_hand() -> None:
    found = smoothing_scale(torch.tensor([4.0, 1.0, 0.0]), torch.tensor([1.0, 4.0, 3.0]), 0.5)
    assert torch.allclose(found, torch.tensor([2.0, 0.5, 1.0]))  # sqrt(4 / 1), sqrt(1 / 4); a channel of zeros
    assert torch.equal(smoothing_scale(torch.zeros(3), torch.ones(3), 0.5), torch.ones(3))


def test_channels_with_large_inputs_are_scaled_down() -> None:
    torch.manual_seed(0)
    X, W = torch.randn(64, 16), torch.randn(8, 16)
    X[:, 3] *= 100
    owner = torch.arange(16)
    found = search_smoothing(X, 0, [W], owner, [to_eight_bits], to_eight_bits)
    assert found.alpha > 0 and int(found.scale.argmax()) == 3
    plain = float((to_eight_bits(X) @ to_eight_bits(W).t() - X @ W.t()).square().sum() / (X @ W.t()).square().sum())
    assert found.loss < plain / 5


def test_inputs_of_one_channel_share_a_scale() -> None:
    torch.manual_seed(0)
    X, W = torch.randn(64, 16), torch.randn(8, 16)
    X[:, 4] *= 100
    found = search_smoothing(X, 0, [W], torch.arange(16) // 4, [to_eight_bits], to_eight_bits)
    assert found.scale.shape == (4,) and int(found.scale.argmax()) == 1


def test_no_scale_where_none_helps() -> None:
    X, W = torch.ones(4, 8), torch.ones(2, 8)
    found = search_smoothing(X, 0, [W], torch.arange(8), [to_eight_bits], to_eight_bits)
    assert found.alpha == 0 and torch.equal(found.scale, torch.ones(8))
