"""Batch norms as they are after training, for the tests of what is folded."""

from __future__ import annotations

from typing import TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

Norm = TypeVar("Norm", bound=_BatchNorm)


def with_statistics(norm: Norm) -> Norm:
    """The norm with random statistics, scales and shifts, where it has them."""
    if norm.running_mean is not None and norm.running_var is not None:
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    if norm.affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return norm
