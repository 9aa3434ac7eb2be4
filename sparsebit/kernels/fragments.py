"""4-bit codes in the order in which lanes of a tensor-core product hold them: the weight's layout of `packed_linear`.

A weight of `(outputs, inputs)` is cut into tiles of 16 x 16. In a product `mma.m16n8k16`, lane `4 g + t` holds 8
elements of a tile: rows `g` and `g + 8`, and of each two pairs of neighbours along k. They are one word: code
`i + 4 * second` has the bits from `4 i + 16 * second` on, where `i` is `row_half + 2 * pair`. So
`(word >> 4 i) & 0x000F000F` is register `i` of the product but for its exponent.

Which k a lane has is free, as long as x follows. Of 32 neighbours, lane `t` has the 8 from `8 t` on, 4 in each of two
tiles: it reads them of x with one load of 16 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Inputs that are one block of words; outputs are padded to a multiple that every kernel can divide.
BLOCK = 128
ROWS = 128
BITS = 4


def arrange(codes: Tensor) -> Tensor:
    """Codes 0 to 15, `(outputs, inputs)` with `inputs % 128 == 0` and `outputs % 16 == 0`, as int32 words.

    The words are `(outputs / 16, inputs / 128, 2, 32 lanes, 4)`.

    >>> codes = torch.arange(16 * 128).reshape(16, 128) % 16
    >>> words = arrange(codes)
    >>> tuple(words.shape), torch.equal(restore(words), codes)
    ((1, 1, 2, 32, 4), True)
    """
    outputs, inputs = codes.shape
    # (row tile, row half, g, block, c: of 32 k, t, tile, pair, second)
    parts = codes.to(torch.int64).reshape(outputs // 16, 2, 8, inputs // BLOCK, 4, 4, 2, 2, 2)
    words = parts.new_zeros(outputs // 16, inputs // BLOCK, 4, 2, 8, 4)
    for half in range(2):
        for pair in range(2):
            for second in range(2):
                codes_here = parts[:, half, :, :, :, :, :, pair, second].permute(0, 2, 3, 5, 1, 4)
                words |= codes_here << (BITS * (half + 2 * pair) + 16 * second)
    # (row tile, block, tiles of 16 k: 2 x 4, lane) -> four words of a lane side by side
    words = words.reshape(outputs // 16, inputs // BLOCK, 2, 4, 32).transpose(3, 4)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).contiguous()


def restore(words: Tensor) -> Tensor:
    """The codes of `arrange`, int64."""
    tiles, blocks = words.shape[:2]
    lanes = (words.to(torch.int64) & 0xFFFFFFFF).transpose(3, 4).reshape(tiles, blocks, 4, 2, 8, 4)
    codes = lanes.new_empty(tiles, 2, 8, blocks, 4, 4, 2, 2, 2)
    for half in range(2):
        for pair in range(2):
            for second in range(2):
                found = (lanes >> (BITS * (half + 2 * pair) + 16 * second)) & 15
                codes[:, half, :, :, :, :, :, pair, second] = found.permute(0, 4, 1, 2, 5, 3)
    return codes.reshape(tiles * 16, blocks * BLOCK)
