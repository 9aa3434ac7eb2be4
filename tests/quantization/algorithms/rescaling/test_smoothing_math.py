from __future__ import annotations

import pytest
import torch

from sparsebit.quantization.algorithms.rescaling.smoothing_math import capped_scale, relative_error, smoothing_scale


def test_alpha_one_makes_activations_equal_and_alpha_zero_weights():
    inputs, weights = torch.tensor([1.0, 4.0, 16.0]), torch.tensor([2.0, 1.0, 8.0])
    equal = inputs / smoothing_scale(inputs, weights, 1.0, 1000)
    assert torch.allclose(equal, equal[0].expand(3))
    equal = weights * smoothing_scale(inputs, weights, 0.0, 1000)
    assert torch.allclose(equal, equal[0].expand(3))


def test_scales_have_a_mean_of_one_and_are_bounded():
    scale = smoothing_scale(torch.tensor([1.0, 100.0]), torch.ones(2), 1.0, 1000)
    assert float(scale.log().mean()) == pytest.approx(0, abs=1e-6)
    assert smoothing_scale(torch.tensor([1.0, 100.0]), torch.ones(2), 1.0, 2.0).tolist() == [0.5, 2.0]


def test_a_channel_of_zeros_keeps_its_scale():
    assert smoothing_scale(torch.tensor([0.0, 4.0, 1.0]), torch.tensor([1.0, 1.0, 1.0]), 0.5, 1000)[0] == 1
    assert smoothing_scale(torch.zeros(2), torch.ones(2), 0.5, 1000).tolist() == [1, 1]


def test_a_cap_scales_only_the_channels_above_it():
    sizes = torch.tensor([1.0, 4.0, 16.0, 64.0])
    assert capped_scale(torch.ones(4), sizes, 0.25, 1000).tolist() == [1, 1, 1, 4]
    assert capped_scale(torch.ones(4), sizes, 1.0, 1000).tolist() == [1, 1, 1, 1]
    scale = torch.tensor([1.0, 1.0, 1.0, 8.0])  # with it the third is the largest
    assert (sizes / capped_scale(scale, sizes, 0.5, 1000)).tolist() == [1, 4, 8, 8]


def test_a_cap_keeps_bounds_and_dead_channels():
    assert capped_scale(torch.ones(2), torch.tensor([1.0, 1e6]), 1e-6, 1000).tolist() == [1, 1000]
    assert capped_scale(torch.ones(2), torch.zeros(2), 0.5, 1000).tolist() == [1, 1]


def test_rows_count_alike():
    targets = torch.tensor([[100.0, 0.0], [1.0, 0.0]])
    outputs = torch.tensor([[100.0, 0.0], [1.0, 1.0]])
    assert relative_error(outputs, targets, per_row=False) < 1e-3
    assert relative_error(outputs, targets, per_row=True) > 0.05
