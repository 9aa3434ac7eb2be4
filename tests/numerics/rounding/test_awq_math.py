"""AWQ's scales: large inputs get large ones, dead channels none, and the best of a grid is never worse than none."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsebit.numerics.rounding.awq_math import channel_scale, search_channel_scale


def to_grid(weight: Tensor) -> Tensor:
    """Three bits, one scale per row."""
    scale = weight.abs().amax(1, keepdim=True) / 3
    return (weight / scale).round() * scale


def test_scales_grow_with_the_inputs() -> None:
    magnitudes = torch.tensor([4.0, 1.0, 0.25, 0.0])
    scale = channel_scale(magnitudes, 0.5)
    torch.testing.assert_close(scale, torch.tensor([2.0, 1.0, 0.5, 1.0]))
    torch.testing.assert_close(channel_scale(5 * magnitudes, 0.5), scale)
    torch.testing.assert_close(channel_scale(magnitudes, 0.0), torch.ones(4))
    torch.testing.assert_close(channel_scale(torch.zeros(3), 0.5), torch.ones(3))


def test_a_few_large_channels_are_saved() -> None:
    torch.manual_seed(0)
    W, x = torch.randn(32, 64), torch.randn(500, 64)
    x[:, :3] *= 20
    H = x.T @ x / len(x)
    problem = ([W, torch.randn(8, 64)], H, torch.arange(64), [to_grid, to_grid])
    found, plain = search_channel_scale(*problem), search_channel_scale(*problem, num_alphas=1)
    assert found.alpha > 0 and found.loss < 0.7 * plain.loss
    assert bool((found.scale[:3] > found.scale[3:].max()).all())


def test_inputs_of_one_channel_share_a_scale() -> None:
    torch.manual_seed(0)
    W, x = torch.randn(16, 8), torch.randn(100, 8)
    owner = torch.tensor([0, 1, 0, 1, 2, 3, 2, 3])
    x[:, 2] *= 30  # of channel 0
    found = search_channel_scale([W], x.T @ x / len(x), owner, [to_grid])
    assert len(found.scale) == 4 and int(found.scale.argmax()) == 0


def test_a_channel_is_as_large_as_the_mean_of_its_inputs() -> None:
    """The last one has a single input, four times as large as each of the sixteen of the first one."""
    torch.manual_seed(0)
    W, H = torch.randn(16, 17), torch.eye(17)
    H[16, 16] = 16
    found = search_channel_scale([W], H, torch.tensor([0] * 16 + [1]), [to_grid])
    assert found.alpha > 0
    torch.testing.assert_close(found.scale[1] / found.scale[0], torch.tensor(4.0**found.alpha))


def test_where_all_inputs_are_alike_nothing_is_scaled() -> None:
    torch.manual_seed(0)
    found = search_channel_scale([torch.randn(8, 16)], torch.eye(16), torch.arange(16), [to_grid])
    assert found.alpha == 0 and bool((found.scale == 1).all())
