from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from sparsebit.kernels.packed_linear_tiles import Work, many_rows_cut


@given(st.integers(1, 600), st.integers(1, 20) | st.integers(1, 300), st.sampled_from([1, 7, 66, 132]))
@example(133, 16, 132)
def test_every_tile_is_computed_once(tiles: int, groups: int, most_blocks: int) -> None:
    """Whole tiles by waves, the others by spans: a span has something to do, and reaches into two tiles at most."""
    work = Work.of(tiles, groups, most_blocks)
    assert 1 <= work.blocks <= most_blocks
    if not work.spans:
        assert work.rest == 0 and (work.waves - 1) * work.blocks < tiles <= work.waves * work.blocks
        return
    assert work.waves * work.blocks + work.rest == tiles
    assert work.rest <= work.spans <= min(work.blocks, work.rest * groups)


@given(st.integers(17, 4096), st.sampled_from([128, 384, 4096, 8192, 28672]), st.sampled_from([128, 4096, 28672]))
def test_tiles_divide_the_outputs(num_rows: int, outputs: int, inputs: int) -> None:
    for bits in (2, 3, 4, 8):
        cut = many_rows_cut(num_rows, outputs, inputs, bits, 132)
        assert outputs % cut.width == 0 and cut.height % 8 == 0


def test_rows_are_hardly_padded() -> None:
    """And tiles are high: a weight is unpacked once in each."""
    several = (150, 256, 300, 384, 512, 640, 768, 1024, 1200)
    heights = {rows: many_rows_cut(rows, 8192, 28672, 4, 132).height for rows in several}
    assert heights == {150: 160, 256: 256, 300: 320, 384: 384, 512: 256, 640: 320, 768: 384, 1024: 352, 1200: 400}
