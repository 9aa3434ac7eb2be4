"""Hadamard matrices on blocks of channels: orthogonal, symmetric, and all entries of one size.

`R = diag(H, H, ...)` with Sylvester's `H_1 = 1`, `H_2n = [[H_n, H_n], [H_n, -H_n]]`, divided by the root of its size,
so that `R R = 1`. Multiplied by `R`, a large value is spread over the channels of its block.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def is_power_of_two(size: int) -> bool:
    return size > 0 and size & (size - 1) == 0


def rotate_blocks(x: Tensor, size: int) -> Tensor:
    """`x R` along the last axis, with blocks of `size` channels, in the type of `x`; its own inverse."""
    assert is_power_of_two(size) and x.shape[-1] % size == 0, f"blocks of {size} of {x.shape[-1]} channels"
    values = x.reshape(-1, size)
    half = 1
    while half < size:  # the fast transform: log2(size) sums and differences of all values
        pairs = values.reshape(-1, size // (2 * half), 2, half)
        values = torch.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), 2).reshape(-1, size)
        half *= 2
    return (values * (1 / math.sqrt(size))).reshape(x.shape)
