from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsebit.kernels.tensor_core_layout import arrange, bits_of, restore


@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from([2, 3, 4, 8]), st.integers(0, 1000))
def test_codes_come_back(tiles: int, blocks: int, bits: int, seed: int) -> None:
    codes = torch.randint(0, 1 << bits, (16 * tiles, 128 * blocks), generator=torch.Generator().manual_seed(seed))
    words = arrange(codes, bits)
    assert words.dtype == torch.int32 and words.numel() * 32 == codes.numel() * bits and bits_of(words) == bits
    assert torch.equal(restore(words), codes)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_lane_holds_what_the_product_wants(bits: int) -> None:
    """Register `i` of a lane in `mma.m16n8k16` is a pair of neighbours along k, of row `g` or `g + 8`."""
    codes = torch.randint(0, 1 << bits, (16, 128))
    words = arrange(codes, bits)[0, 0].to(torch.int64) & 0xFFFFFFFF
    for tile in range(8):
        for lane in range(32):
            g, t = divmod(lane, 4)
            for register in range(4):
                k = 32 * (tile // 2) + 8 * t + 4 * (tile % 2) + 2 * (register // 2)
                expected = codes[g + 8 * (register % 2), k : k + 2].tolist()
                assert _held(words, bits, tile, lane, register) == expected


@pytest.mark.parametrize("bits", [2, 4])
def test_word_t_of_the_lanes_of_a_row_is_what_lane_t_wants_of_x_as_it_is(bits: int) -> None:
    """`ldmatrix` gives lane t the word t of each: two neighbours of every 8 along k."""
    codes = torch.randint(0, 1 << bits, (16, 128))
    words = arrange(codes, bits)[0, 0].to(torch.int64) & 0xFFFFFFFF
    for lane in range(32):
        g, t = divmod(lane, 4)
        for other in range(4):
            place = (4 * g + other) ^ (g // 2 % 4)
            for part in range(len(words) // 128):
                word = int(words[128 * part + 4 * place + t])
                for field in range(16 // bits):
                    k = 64 * part + 32 * (field // 2) + 8 * other + 2 * t
                    found = [word >> bits * field + half & (1 << bits) - 1 for half in (0, 16)]
                    assert found == codes[g + 8 * (field % 2), k : k + 2].tolist()


def _held(words: torch.Tensor, bits: int, tile: int, lane: int, register: int) -> list[int]:
    """The two codes of a register, read as the programs read them."""
    lane ^= lane // 8 % 4
    word = 2 * (tile % 2) + register // 2
    if bits in (4, 8):
        shift = 8 * (tile // 2 % 2) + 4 * (register % 2)
        pairs = [int(words[256 * p + 128 * (tile // 4) + 4 * lane + word]) >> shift for p in range(bits // 4)]
        return [sum((pair >> place & 15) << 4 * p for p, pair in enumerate(pairs)) for place in (0, 16)]
    if bits == 2:
        pair = int(words[4 * lane + word]) >> 4 * (tile // 2) + 2 * (register % 2)
        return [pair & 3, pair >> 16 & 3]
    six = [*words[4 * lane : 4 * lane + 4].tolist(), *words[128 + 2 * lane : 130 + 2 * lane].tolist()]
    a, b, c = six[:3] if tile < 4 else six[3:]
    number = 2 * (tile % 4) + register // 2
    if register % 2:
        pair = [a, a >> 6, b, b >> 6, c, c >> 6, a >> 9, b >> 9][number] >> 3
    else:
        last = a >> 15 & 0x10001 | b >> 14 & 0x20002 | c >> 13 & 0x40004
        pair = [a, a >> 6, b, b >> 6, c, c >> 6, c >> 12, last][number]
    return [pair & 7, pair >> 16 & 7]
