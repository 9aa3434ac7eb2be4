"""The channels of a layer's weight: how large each one is, and a factor for each one in the weight's shape.

Weights are those of linear layers `(out, in)`, convolutions `(out, in / groups, *kernel)` and transposed convolutions
`(in, out / groups, *kernel)`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd


def num_inputs(layer: Any) -> int:
    """The number of channels that the layer reads."""
    return int(layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels)


def num_outputs(layer: Any) -> int:
    """The number of channels that the layer outputs."""
    return int(layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels)


def num_dims(layer: nn.Module) -> int:
    """The number of spatial dimensions of a convolution's input; 0 for a linear layer."""
    return len(layer.kernel_size) if isinstance(layer, _ConvNd) else 0


def output_sizes(layer: nn.Module) -> Tensor:
    """The largest magnitude among the weights of each output channel, `(out,)`."""
    weight = layer.get_parameter("weight").detach().abs()
    if isinstance(layer, _ConvTransposeNd):
        return _grouped(weight, layer.groups).amax((1, 3)).flatten()
    return weight.flatten(1).amax(1)


def input_sizes(layer: nn.Module) -> Tensor:
    """The largest magnitude among the weights that read each input channel, `(in,)`."""
    weight = layer.get_parameter("weight").detach().abs()
    if isinstance(layer, _ConvTransposeNd):
        return weight.flatten(1).amax(1)
    return _grouped(weight, _groups(layer)).amax((1, 3)).flatten()


def along_outputs(layer: nn.Module, factor: Tensor) -> Tensor:
    """`factor (out,)`, shaped to multiply the weight."""
    if not isinstance(layer, _ConvTransposeNd):
        return factor.reshape(-1, *([1] * (layer.get_parameter("weight").ndim - 1)))
    per_input = factor.reshape(layer.groups, 1, -1).expand(-1, layer.in_channels // layer.groups, -1)
    return per_input.reshape(layer.in_channels, -1, *([1] * (layer.get_parameter("weight").ndim - 2)))


def along_inputs(layer: nn.Module, factor: Tensor) -> Tensor:
    """`factor (in,)`, shaped to multiply the weight."""
    weight = layer.get_parameter("weight")
    if isinstance(layer, _ConvTransposeNd):
        return factor.reshape(-1, *([1] * (weight.ndim - 1)))
    groups = _groups(layer)
    per_output = factor.reshape(groups, 1, -1).expand(-1, weight.shape[0] // groups, -1)
    return per_output.reshape(weight.shape[0], -1, *([1] * (weight.ndim - 2)))


def largest_by_channel(values: Tensor, channels: Tensor, num_channels: int) -> Tensor:
    """The largest of the `values` (0 or more) of each channel, `(num_channels,)`; `channels`: of each, -1: none."""
    found = torch.zeros(num_channels, dtype=values.dtype, device=values.device)
    is_ours = channels >= 0
    return found.scatter_reduce_(0, channels[is_ours].long(), values[is_ours], "amax")


def _groups(layer: nn.Module) -> int:
    return layer.groups if isinstance(layer, _ConvNd) else 1


def _grouped(weight: Tensor, groups: int) -> Tensor:
    """`(a, b, *kernel)` as `(groups, a / groups, b, kernel)`."""
    return weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)
