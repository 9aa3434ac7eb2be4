"""`RowCodes`: keys or values of a token and head as one row of bytes, and back.

- int8: `x / scale`, rounded, from -128 to 127; one byte a number. The scale is a constant of the layer, or of the head.
- fp8: `x / scale` as float8_e4m3fn, at most 448; one byte a number, with such a constant scale too.
- int4: the row is multiplied by a Hadamard matrix, which spreads the large numbers of a few channels over all of them.
  Blocks of 32 numbers then share a scale, in float16, and each number takes the nearest of 16 levels that are closer
  to each other near zero (those of IQ4_NL in llama.cpp), where rotated numbers are frequent. The squared error of
  book-llama's keys and values is 15 and 20 % below that of equal steps. Six scales are tried, around those that put
  the largest number on the first or the last level. Two codes are in a byte, and the scales follow the codes: 4.5 bits
  a number.

Formulas and ranges of int8 and fp8 are those of `kv_cache_scheme` in compressed-tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsebit.errors import ConfigError
from sparsebit.llm.caching.cache_kinds import CacheKind
from sparsebit.numerics.hadamard import rotate_blocks
from sparsebit.numerics.spec import LARGEST_FLOAT8

BLOCK = 32
_LEAST_BLOCK = 8
_LARGEST_HALF = 65504.0
_LEVELS = torch.tensor([-127.0, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
# Of the largest number: the candidates for the scale.
_FACTORS = torch.tensor([[1.0, 0.9, 1.1]]).div(_LEVELS[[0, -1], None]).flatten()
_TOKENS_AT_ONCE = 512


@dataclass(frozen=True)
class RowCodes:
    """`scale`: `(heads, 1, 1)` or `(1,)`, for int8 and fp8; None for int4, whose scales are in the rows."""

    kind: CacheKind
    scale: Tensor | None = None

    def pack(self, x: Tensor) -> Tensor:
        """Rows of bytes, `(..., tokens, bytes)`, of numbers `(batch, heads, tokens, width)`."""
        if self.kind == "int4":
            return _pack_int4(x.detach().float())
        scaled = x.detach().float() / self._scale(x)
        if self.kind == "int8":
            return scaled.round_().clamp_(-128, 127).to(torch.int8).view(torch.uint8)
        return scaled.clamp_(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(torch.float8_e4m3fn).view(torch.uint8)

    def unpack(self, rows: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """The numbers of packed rows; `width`: of a row."""
        if self.kind == "int4":
            return _unpack_int4(rows, width).to(dtype)
        if self.kind == "fp8" and rows.device.type == "cpu":
            return _float8_by_bits(rows).mul_(self._scale(rows) * 256).to(dtype)
        codes = rows.view(torch.int8 if self.kind == "int8" else torch.float8_e4m3fn)
        return (codes.float() * self._scale(rows)).to(dtype)

    def _scale(self, like: Tensor) -> Tensor:
        assert self.scale is not None, f"{self.kind} without a scale"
        return self.scale.to(like.device)


def block_of(width: int) -> int:
    """The size of the blocks of a row: 32, or the largest power of two that divides the row."""
    size = math.gcd(width, BLOCK)
    if size < _LEAST_BLOCK:
        raise ConfigError(f"a cache of 4 bits for heads of {width} numbers: allowed: multiples of {_LEAST_BLOCK}")
    return size


def _float8_by_bits(rows: Tensor) -> Tensor:
    """The numbers of float8_e4m3fn divided by 256, three times as fast as torch converts them on a CPU.

    The 7 bits behind the sign are the middle of a float16 whose exponent begins 8 lower. The codes of NaN become
    numbers: a model that computes NaN has it in its hidden states too.
    """
    shifted = rows.view(torch.int8).to(torch.int16) << 7
    return (shifted & ~(1 << 14)).view(torch.float16).float()  # without the second copy of the sign


def _pack_int4(x: Tensor) -> Tensor:
    if x.shape[-2] > _TOKENS_AT_ONCE:
        return torch.cat([_pack_int4(part) for part in x.split(_TOKENS_AT_ONCE, -2)], -2)
    width = x.shape[-1]
    blocks = (x @ _hadamard(width, x.device)).unflatten(-1, (-1, 1, block_of(width)))
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    levels, factors = _LEVELS.to(x.device), _FACTORS.to(x.device)
    scales = (largest * factors[:, None]).clamp(-_LARGEST_HALF, _LARGEST_HALF).half()  # (..., blocks, candidates, 1)
    divisors = torch.where(scales == 0, 1.0, scales.float())
    borders = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(blocks / divisors, borders, out_int32=True).clamp_(max=len(levels) - 1)  # NaN: beyond all
    errors = (levels[codes] * scales - blocks).square().sum(-1, keepdim=True)
    best = errors.argmin(-2, keepdim=True)
    chosen = codes.gather(-2, best.expand(*best.shape[:-1], codes.shape[-1])).to(torch.uint8).flatten(-3)
    scale = scales.gather(-2, best).flatten(-3).contiguous()
    return torch.cat((chosen[..., ::2] | chosen[..., 1::2] << 4, scale.view(torch.uint8)), -1)


def _unpack_int4(rows: Tensor, width: int) -> Tensor:
    values = F.embedding(rows[..., : width // 2].int(), _pairs(rows.device)).flatten(-2)
    scales = rows[..., width // 2 :].contiguous().view(torch.float16).float()
    scaled: Tensor = values.unflatten(-1, (-1, block_of(width))).mul_(scales[..., None]).flatten(-2)
    return scaled @ _hadamard(width, rows.device)


# By width (0: the levels) and device. Not `lru_cache`, which torch.compile warns of.
_TABLES: dict[tuple[int, torch.device], Tensor] = {}


def _pairs(device: torch.device) -> Tensor:
    """The two levels of each byte, `(256, 2)`."""
    if (0, device) not in _TABLES:
        octets = torch.arange(256)
        _TABLES[0, device] = torch.stack((_LEVELS[octets & 15], _LEVELS[octets >> 4]), -1).to(device)
    return _TABLES[0, device]


def _hadamard(width: int, device: torch.device) -> Tensor:
    """The matrix of `rotate_blocks` with the largest blocks that divide the row; its own inverse."""
    if (width, device) not in _TABLES:
        _TABLES[width, device] = rotate_blocks(torch.eye(width), width & -width).to(device)
    return _TABLES[width, device]
