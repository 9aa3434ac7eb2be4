"""Blocks of 256 weights as GGUF files keep them: Q4_K and Q6_K.

| type | bytes | a weight is | integers |
|---|---|---|---|
| Q4_K | 144 | `d * scale * code - dmin * min` | codes 0..15; of 32 weights a scale and a min, 0..63 |
| Q6_K | 210 | `d * scale * (code - 32)` | codes 0..63; of 16 weights a scale, -128..127 |

`d` and `dmin` are float16. Values are computed in float32 in the order of the formula, as llama.cpp and the package
gguf compute them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SUPER_BLOCK = 256
Q4_K_BYTES, Q6_K_BYTES = 144, 210
Q4_K_GROUP, Q6_K_GROUP = 32, 16
Q6_K_MIDDLE = 32


@dataclass(frozen=True)
class Q4K:
    """`d`, `dmin (rows, blocks)` float16; `scales`, `mins (rows, blocks, 8)`; `codes (rows, blocks, 8, 32)`: uint8."""

    d: Tensor
    dmin: Tensor
    scales: Tensor
    mins: Tensor
    codes: Tensor

    def values(self) -> Tensor:
        """`(rows, columns)` float32."""
        scales = (self.d.float()[..., None] * self.scales.float())[..., None]
        mins = (self.dmin.float()[..., None] * self.mins.float())[..., None]
        return (scales * self.codes.float() - mins).flatten(1)

    def to_bytes(self) -> Tensor:
        """`(rows, blocks * 144)` uint8."""
        low, high = self.codes[..., 0::2, :], self.codes[..., 1::2, :]
        parts = [
            _half_bytes(self.d),
            _half_bytes(self.dmin),
            _pack_six_bits(self.scales, self.mins),
            (low | high << 4).flatten(-2),
        ]
        return torch.cat(parts, -1).flatten(1).contiguous()

    @classmethod
    def from_bytes(cls, data: Tensor) -> Q4K:
        blocks = data.unflatten(1, (-1, Q4_K_BYTES))
        scales, mins = _unpack_six_bits(blocks[..., 4:16])
        packed = blocks[..., 16:].unflatten(-1, (4, 32))
        codes = torch.stack([packed & 15, packed >> 4], -2).flatten(-3, -2)
        return cls(_half(blocks[..., 0:2]), _half(blocks[..., 2:4]), scales, mins, codes)


@dataclass(frozen=True)
class Q6K:
    """`d (rows, blocks)` float16; `scales (rows, blocks, 16)` int8; `codes (rows, blocks, 16, 16)` uint8."""

    d: Tensor
    scales: Tensor
    codes: Tensor

    def values(self) -> Tensor:
        """`(rows, columns)` float32."""
        scales = (self.d.float()[..., None] * self.scales.float())[..., None]
        return (scales * (self.codes.float() - Q6_K_MIDDLE)).flatten(1)

    def to_bytes(self) -> Tensor:
        """`(rows, blocks * 210)` uint8: lower four bits, upper two bits, scales, `d`."""
        codes = self.codes.flatten(-2).unflatten(-1, (2, 4, 32))  # halves of a block, quarters of a half
        low, high = codes & 15, codes >> 4
        lower = torch.cat([low[..., 0, :] | low[..., 2, :] << 4, low[..., 1, :] | low[..., 3, :] << 4], -1)
        upper = high[..., 0, :] | high[..., 1, :] << 2 | high[..., 2, :] << 4 | high[..., 3, :] << 6
        parts = [lower.flatten(-2), upper.flatten(-2), self.scales.view(torch.uint8), _half_bytes(self.d)]
        return torch.cat(parts, -1).flatten(1).contiguous()

    @classmethod
    def from_bytes(cls, data: Tensor) -> Q6K:
        blocks = data.unflatten(1, (-1, Q6_K_BYTES))
        lower = blocks[..., :128].unflatten(-1, (2, 2, 32))  # halves of a block, lower and upper half of 64 bytes
        upper = blocks[..., 128:192].unflatten(-1, (2, 32))
        low = torch.cat([lower & 15, lower >> 4], -2)
        high = torch.stack([upper >> shift & 3 for shift in (0, 2, 4, 6)], -2)
        codes = (low | high << 4).flatten(-3).unflatten(-1, (16, 16))
        scales = blocks[..., 192:208].contiguous().view(torch.int8)
        return cls(_half(blocks[..., 208:210]), scales, codes)


def _pack_six_bits(scales: Tensor, mins: Tensor) -> Tensor:
    """Eight scales and eight mins of six bits in 12 bytes: the upper two bits of the last four are in the first."""
    first = scales[..., :4] | scales[..., 4:] >> 4 << 6
    second = mins[..., :4] | mins[..., 4:] >> 4 << 6
    third = scales[..., 4:] & 15 | (mins[..., 4:] & 15) << 4
    return torch.cat([first, second, third], -1)


def _unpack_six_bits(data: Tensor) -> tuple[Tensor, Tensor]:
    first, second, third = data[..., :4], data[..., 4:8], data[..., 8:]
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], -1)
    mins = torch.cat([second & 63, third >> 4 | second >> 6 << 4], -1)
    return scales, mins


def _half_bytes(numbers: Tensor) -> Tensor:
    return numbers[..., None].contiguous().view(torch.uint8)


def _half(data: Tensor) -> Tensor:
    return data.contiguous().view(torch.float16)[..., 0]
