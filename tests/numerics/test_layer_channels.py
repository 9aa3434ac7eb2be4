"""Sizes and factors of the channels of a layer's weight, for every form of weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sparsebit.numerics.layer_channels import (
    along_inputs,
    along_outputs,
    input_sizes,
    largest_by_channel,
    num_inputs,
    num_outputs,
    output_sizes,
)

LAYERS = {
    "linear": nn.Linear(4, 6),
    "conv": nn.Conv2d(4, 6, 3),
    "grouped conv": nn.Conv2d(4, 6, 3, groups=2),
    "depthwise conv": nn.Conv2d(4, 8, 3, groups=4),
    "transposed": nn.ConvTranspose2d(4, 6, 3),
    "grouped transposed": nn.ConvTranspose2d(4, 6, 3, groups=2),
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_a_factor_of_inputs_and_outputs_is_one_of_the_weight(layer: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4) if isinstance(layer, nn.Linear) else torch.randn(2, 4, 6, 6)
    inputs, outputs = torch.rand(num_inputs(layer)) + 0.5, torch.rand(num_outputs(layer)) + 0.5
    shape = (-1,) if isinstance(layer, nn.Linear) else (-1, 1, 1)
    with torch.no_grad():
        expected = (layer(x * inputs.reshape(shape)) - layer(0 * x)) * outputs.reshape(shape)
        weight = layer.weight * along_inputs(layer, inputs) * along_outputs(layer, outputs)
        got = torch.func.functional_call(layer, {"weight": weight, "bias": torch.zeros_like(layer.bias)}, (x,))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_sizes_are_those_of_single_channels(layer: Any) -> None:
    for channel in range(num_inputs(layer)):
        mask = along_inputs(layer, torch.eye(num_inputs(layer))[channel])
        assert float((layer.weight.detach() * mask).abs().max()) == pytest.approx(float(input_sizes(layer)[channel]))
    for channel in range(num_outputs(layer)):
        mask = along_outputs(layer, torch.eye(num_outputs(layer))[channel])
        assert float((layer.weight.detach() * mask).abs().max()) == pytest.approx(float(output_sizes(layer)[channel]))


def test_the_largest_of_each_channel() -> None:
    values, channels = torch.tensor([1.0, 5.0, 2.0, 9.0]), torch.tensor([0, 0, 2, -1])
    assert largest_by_channel(values, channels, 3).tolist() == [5, 0, 2]
