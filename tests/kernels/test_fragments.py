from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsebit.kernels.fragments import arrange, restore


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 1000))
def test_codes_come_back(tiles: int, blocks: int, seed: int) -> None:
    codes = torch.randint(0, 16, (16 * tiles, 128 * blocks), generator=torch.Generator().manual_seed(seed))
    words = arrange(codes)
    assert words.dtype == torch.int32 and words.numel() * 8 == codes.numel()
    assert torch.equal(restore(words), codes)


def test_a_lane_holds_what_the_product_wants() -> None:
    """Register `i` of a lane in `mma.m16n8k16` is a pair of neighbours along k, of row `g` or `g + 8`."""
    codes = torch.randint(0, 16, (16, 128))
    words = arrange(codes)[0, 0].to(torch.int64) & 0xFFFFFFFF  # (2, lanes, 4)
    for tile in range(8):
        for lane in range(32):
            g, t = divmod(lane, 4)
            word = int(words[tile // 4, lane, tile % 4])
            for register in range(4):
                pair = (word >> 4 * register) & 0x000F000F
                k = 32 * (tile // 2) + 8 * t + 4 * (tile % 2) + 2 * (register // 2)
                expected = codes[g + 8 * (register % 2), k : k + 2].tolist()
                assert [pair & 15, pair >> 16] == expected
