"""Distances of outputs from targets, as losses of a block's training: squared error, divergence of softmaxes."""

from __future__ import annotations

import functools
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsebit.errors import CalibrationError
from sparsebit.execution.blocks.runner import Values
from sparsebit.graph.values.nested import tensors_of

Loss = Literal["squared", "kl"]


def squared_error(outputs: Values, targets: Values, extras: Values = ()) -> Tensor:
    """The squared error relative to the targets' energy, summed over the block's float outputs.

    `extras`: one weight for each element of each output, in the outputs' structure (Fisher information); without them
    all have the same weight.
    """
    found, weights = [], tensors_of(extras)
    for index, (output, target) in enumerate(zip(tensors_of(outputs), tensors_of(targets), strict=True)):
        if output.is_floating_point():
            error, energy = (output.float() - target.float()).square(), target.float().square()
            if weights:
                error, energy = error * weights[index], energy * weights[index]
            found.append(error.sum() / energy.sum().clamp_min(1e-20))
    return _summed(found)


def directed_error(outputs: Values, targets: Values, extras: Values) -> Tensor:
    """The squared error along the directions in `extras`, after the weights: `mean (g . d)^2 / mean (g^2 . t^2)`.

    `d`: the error of a sample's outputs, `t`: its targets, `g`: one direction for all outputs.
    """
    pairs = list(zip(tensors_of(outputs), tensors_of(targets), strict=True))
    directions = tensors_of(extras)[len(pairs) :]
    error, energy = torch.zeros(()), torch.zeros(())
    for first in range(0, len(directions), len(pairs)):
        along = torch.zeros(())
        for direction, (output, target) in zip(directions[first : first + len(pairs)], pairs, strict=True):
            if output.is_floating_point():
                share = direction * (output.float() - target.float())
                along = along.to(share) + share.reshape(len(share), -1).sum(1)
                energy = energy.to(share) + (direction * target.float()).square().sum()
        error = error.to(along) + along.square().sum()
    return error / energy.clamp_min(1e-20)


def divergence(outputs: Values, targets: Values, temperature: float = 1.0) -> Tensor:
    """The Kullback-Leibler divergence of the softmaxes over the last dimension, times the square of the temperature.

    The mean over all other dimensions, summed over the float outputs.
    """
    found = []
    for output, target in _float_pairs(outputs, targets):
        own, other = (F.log_softmax(x.float() / temperature, -1) for x in (output, target))
        found.append(F.kl_div(own, other, log_target=True, reduction="none").sum(-1).mean() * temperature**2)
    return _summed(found)


def _float_pairs(outputs: Values, targets: Values) -> list[tuple[Tensor, Tensor]]:
    pairs = zip(tensors_of(outputs), tensors_of(targets), strict=True)
    return [(output, target) for output, target in pairs if output.is_floating_point()]


def _summed(found: list[Tensor]) -> Tensor:
    if not found:
        raise CalibrationError("the block has no float output, so there is nothing to compare")
    return functools.reduce(torch.add, found)
