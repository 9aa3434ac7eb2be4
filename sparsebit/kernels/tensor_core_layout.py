"""Codes of 2, 3, 4 or 8 bits in the order in which the lanes of a tensor-core product hold them.

A weight `(outputs, inputs)` is cut into tiles of 16 x 16. In the instruction `mma.m16n8k16`, lane `4 g + t` of a warp
holds 8 elements of a tile: of the rows `g` and `g + 8`, two pairs of neighbours along k each. Register
`row_half + 2 * pair` holds one pair. In a packed word, the first code of a pair is in the lower 16 bits, and the second
at the same place in the upper 16. So `(word >> place) & mask` is a register of the product, except for its exponent
bits. `_places` lists where each code is.

The hardware does not fix which k a lane has, as long as the lanes of x have the same ones. Here lane `t` has 8 of every
32 neighbours, from `8 t` on, 4 in each of two tiles: it reads them from x with one load of 16 bytes. Its word `p` holds
neighbours `2 p` and `2 p + 1` of these 8, except with 3 bits. So word `t` of all four lanes of a row is what lane `t`
needs if x is not read in that order.

Lane `4 g + t` is stored at place `4 g + (t ^ (g // 2 % 4))`: lanes with the same `t` then read from different banks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Inputs that are one block of words; outputs are padded to a multiple that every kernel can divide.
BLOCK = 128
ROWS = 128
BITS = (2, 3, 4, 8)
_TILES = BLOCK // 16
_WORDS_OF_A_BIT = 16 * BLOCK // 32


def arrange(codes: Tensor, bits: int = 4) -> Tensor:
    """Codes from 0 on, `(outputs, inputs)` with `inputs % 128 == 0` and `outputs % 16 == 0`, as int32 words.

    The words are `(outputs / 16, inputs / 128, 64 bits)`.

    >>> codes = torch.arange(16 * 128).reshape(16, 128) % 8
    >>> words = arrange(codes, 3)
    >>> tuple(words.shape), torch.equal(restore(words), codes)
    ((1, 1, 192), True)
    """
    outputs, inputs = codes.shape
    # (row tile, row half, g, block, c: of 32 k, t, tile, pair, second)
    parts = codes.to(torch.int64).reshape(outputs // 16, 2, 8, inputs // BLOCK, 4, 4, 2, 2, 2)
    # (row tile, block, tile of 16 k, lane, register, second)
    held = parts.permute(0, 3, 4, 6, 2, 5, 7, 1, 8).reshape(outputs // 16, inputs // BLOCK, _TILES, 32, 4, 2)
    words = held.new_zeros(outputs // 16, inputs // BLOCK, 2 * bits, 32)
    for tile, register, place in _places(bits):
        for second in range(2):
            code = held[:, :, tile, :, register, second] >> place.bit & (1 << place.width) - 1
            words[:, :, place.word] |= code << place.at + 16 * second
    placed = words[..., _places_of_lanes()]
    loaded = [part.transpose(2, 3).flatten(2) for part in placed.split(4, 2)]  # what a lane loads at once is together
    found = torch.cat(loaded, -1)
    return torch.where(found >= 1 << 31, found - (1 << 32), found).to(torch.int32)


def restore(words: Tensor) -> Tensor:
    """The codes of `arrange`, int64."""
    tiles, blocks = words.shape[:2]
    bits = bits_of(words)
    sizes = [min(4, 2 * bits - first) for first in range(0, 2 * bits, 4)]
    loaded = (words.to(torch.int64) & 0xFFFFFFFF).split([32 * size for size in sizes], -1)
    by_word = [part.unflatten(2, (32, size)).transpose(2, 3) for part, size in zip(loaded, sizes, strict=True)]
    of_lane = torch.cat(by_word, 2)[..., _places_of_lanes()]
    held = of_lane.new_zeros(tiles, blocks, _TILES, 32, 4, 2)
    for tile, register, place in _places(bits):
        for second in range(2):
            code = of_lane[:, :, place.word] >> place.at + 16 * second & (1 << place.width) - 1
            held[:, :, tile, :, register, second] |= code << place.bit
    parts = held.reshape(tiles, blocks, 4, 2, 8, 4, 2, 2, 2).permute(0, 7, 4, 1, 2, 5, 3, 6, 8)
    return parts.reshape(tiles * 16, blocks * BLOCK)


def _places_of_lanes() -> list[int]:
    """The lane of each place; the same list also maps lanes to places."""
    return [lane ^ (lane // 8 % 4) for lane in range(32)]


def bits_of(words: Tensor) -> int:
    """Bits of a code."""
    return int(words.shape[2]) // _WORDS_OF_A_BIT


@dataclass(frozen=True)
class _Place:
    """The position of `width` bits of a code, from its bit `bit` on: in word `word` of a lane, from bit `at` on."""

    word: int
    at: int
    bit: int
    width: int


def _places(bits: int) -> Iterator[tuple[int, int, _Place]]:
    """Tile, register and place of every code that a lane has of a block.

    A word of 4-bit codes has the same two neighbours of two times 32, one of 2-bit codes of four times 32; both for
    two rows. Eight bits are words of the lower four, then of the upper four. Three words of 3-bit codes are four tiles:
    each has five registers, and the last bit of the three is another.
    """
    for tile in range(_TILES):
        for register in range(4):
            word = 2 * (tile % 2) + register // 2
            if bits == 2:
                yield tile, register, _Place(word, 4 * (tile // 2) + 2 * (register % 2), 0, 2)
            elif bits == 3:
                for place in _places_of_three(tile, register):
                    yield tile, register, place
            else:
                for part in range(bits // 4):
                    at = 8 * (tile // 2 % 2) + 4 * (register % 2)
                    yield tile, register, _Place(_TILES * part + 4 * (tile // 4) + word, at, 4 * part, 4)


def _places_of_three(tile: int, register: int) -> Iterator[_Place]:
    """The upper rows of a tile have places 0, 6 and 12 of a word, the lower rows 3, 9 and 12."""
    first, half, number = 3 * (tile // 4), register % 2, 2 * (tile % 4) + register // 2
    if number < 6:
        yield _Place(first + number // 2, 6 * (number % 2) + 3 * half, 0, 3)
    elif half or number == 6:
        yield _Place(first + (number - 6 if half else 2), 12, 0, 3)
    else:
        for bit in range(3):
            yield _Place(first + bit, 15, bit, 1)
