"""4-bit floats E2M1: one bit of sign, two of exponent, one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.

OCP Microscaling Formats specification 1.0 (2023), section 5.3.3. A code is the sign (bit 3) and the index of the
magnitude (bits 0 to 2). Two codes share a byte, the one of the even column in its low half.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsebit.numerics.spec import TensorSpec

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST_FLOAT4 = MAGNITUDES[-1]


def float4_codes(x: Tensor) -> Tensor:
    """The codes of the nearest numbers, uint8; values beyond the largest become the largest, halves go to even."""
    size, found = x.abs(), x.signbit().to(torch.uint8) << 3
    for index, (low, high) in enumerate(itertools.pairwise(MAGNITUDES)):
        border = (low + high) / 2
        # Halfway between two numbers the one with an even index is taken, as hardware rounds.
        found += size >= border if index % 2 else size > border
    return found


def float4_values(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of the codes.

    Computed, not looked up: a table would be copied to a GPU at each call, which a CUDA graph does not allow. From the
    second number on a magnitude is `(2 + mantissa) * 2^exponent / 4`.
    """
    size = codes & 7
    quarters = torch.where(size < 2, size << 1, ((size & 1) | 2) << (size >> 1))
    return quarters.to(dtype) * (0.25 - 0.5 * (codes >> 3).to(dtype))


@dataclass(frozen=True)
class Float4Spec(TensorSpec):
    """The format of grids (`weight_grid.py`) whose steps are these numbers instead of integers."""


def nearest_float4(values: Tensor) -> Tensor:
    """Each value rounded to such a number, in its own type."""
    return float4_values(float4_codes(values), values.dtype)


def pack_float4(codes: Tensor) -> Tensor:
    """`(rows, columns)` to `(rows, columns / 2)`, uint8."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack_float4(octets: Tensor) -> Tensor:
    """The inverse of `pack_float4`."""
    return torch.stack((octets & 15, octets >> 4), -1).flatten(1)
