"""Products with a packed weight in plain torch: blocks of its rows are unpacked while they are multiplied."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsebit.llm.layers.packed_weight import PackedWeight, dequantize
from sparsebit.numerics.packing import unpack

# Weights that are unpacked at once: 4 MiB in float32, which stays in the cache of a core or near it.
_BLOCK_ELEMENTS = 1 << 20
# On a GPU small blocks would leave it idle between their kernels: 128 MiB in bfloat16, more than most layers have.
_BLOCK_ELEMENTS_ON_GPU = 1 << 26
# `_few_rows` is used up to this many rows of x. One row on x86: 1.4 times as fast for 4 bits, 1.2 times for 2, the
# same for 3 and 8; at 16 rows about the same for all.
_MOST_FEW_ROWS = 16


def packed_linear(x: Tensor, packed: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """`x (..., in)` times the packed weight: the values are those of `packed.dequantize` in the type of `x`."""
    if x.dtype == torch.float32 and not x.is_cuda and 0 < x.numel() <= _MOST_FEW_ROWS * packed.in_features:
        y = _few_rows(x.reshape(-1, packed.in_features), packed).reshape(*x.shape[:-1], packed.out_features)
        return y if bias is None else y + bias.to(x.dtype)
    return definition(x, packed, bias)


def definition(x: Tensor, packed: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """The reference for faster ways: blocks of rows are dequantized to the type of `x`, one at a time."""
    blocks = [
        F.linear(x, _dense(packed, rows, x.dtype), None if bias is None else bias[rows].to(x.dtype))
        for rows in _row_blocks(packed)
    ]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, -1)


def packed_transposed(y: Tensor, packed: PackedWeight) -> Tensor:
    """`y (..., out)` times the weight itself: the gradient of `packed_linear`, a block of rows at a time."""
    flat = y.reshape(-1, packed.out_features)
    found: Tensor | None = None
    for rows in _row_blocks(packed):
        weight = _dense(packed, rows, y.dtype)
        found = flat[:, rows] @ weight if found is None else found.addmm_(flat[:, rows], weight)
    assert found is not None
    return found.reshape(*y.shape[:-1], packed.in_features)


def _dense(packed: PackedWeight, rows: slice, dtype: torch.dtype) -> Tensor:
    codes = unpack(packed.qweight[rows], packed.bits, packed.in_features)
    zeros = None if packed.zeros is None else packed.zeros[rows]
    return dequantize(codes, packed.scales[rows], zeros, packed.bits, dtype)


def _few_rows(x: Tensor, packed: PackedWeight) -> Tensor:
    """`x (rows, in)` in float32. Codes are multiplied directly, and each group's sum is scaled afterwards.

    `sum (code - zero) scale x = scale (sum code x - zero sum x)` within a group, so that the weight is neither shifted
    nor scaled. Codes that share a byte are neighbours: those at one place of all bytes are multiplied with every
    second (4 bits) or fourth (2 bits) column of x, and need not be brought in order.
    """
    groups, size = packed.scales.shape[1], packed.group_size
    num_planes = _num_planes(packed)
    columns = [
        x[:, plane::num_planes].unflatten(1, (groups, -1)).transpose(0, 1).contiguous() for plane in range(num_planes)
    ]
    sums = x.unflatten(1, (groups, size)).sum(-1).t()[:, :, None]  # (groups, rows, 1)
    blocks = []
    for rows in _row_blocks(packed):
        product = torch.zeros(())
        for plane, codes in enumerate(_planes(packed, rows, num_planes)):
            weight = codes.to(torch.float32).unflatten(1, (groups, -1)).permute(1, 2, 0)
            product = torch.baddbmm(product, columns[plane], weight, beta=min(plane, 1))
        if packed.zeros is None:
            product -= sums * (1 << packed.bits - 1)
        else:
            product -= sums * packed.zeros[rows].t()[:, None, :]
        product *= packed.scales[rows].t()[:, None, :]
        blocks.append(product.sum(0))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, -1)


def _num_planes(packed: PackedWeight) -> int:
    """How many codes share a byte; 1 if codes cross the borders of bytes or bytes those of groups."""
    count = 8 // packed.bits
    whole = 8 % packed.bits == 0 and packed.group_size % count == 0
    return count if whole and sys.byteorder == "little" else 1


def _planes(packed: PackedWeight, rows: slice, num_planes: int) -> list[Tensor]:
    """The codes of some rows as uint8: those of every `num_planes`-th column, starting at each of the first ones."""
    words = packed.qweight[rows]
    if num_planes == 1:
        return [unpack(words, packed.bits, packed.in_features)]
    octets = words.contiguous().view(torch.uint8)[:, : packed.in_features // num_planes]
    mask = (1 << packed.bits) - 1
    return [(octets >> packed.bits * plane) & mask for plane in range(num_planes)]


def _row_blocks(packed: PackedWeight) -> list[slice]:
    most = _BLOCK_ELEMENTS_ON_GPU if packed.qweight.is_cuda else _BLOCK_ELEMENTS
    count = max(most // packed.in_features, 1)
    return [slice(start, start + count) for start in range(0, packed.out_features, count)]
