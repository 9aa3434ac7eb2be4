"""How the programs of `packed_linear` divide a product: the part of each block of threads.

The numbers were measured on an H200 (`benchmarks/packed_linear_ways.py`).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from sparsebit.kernels.tensor_core_layout import BLOCK


@dataclass(frozen=True)
class FewRowsCut:
    """The sizes of `few_rows`: tiles of 16 outputs a block, its warps, blocks per multiprocessor at once.

    `depth`: how many groups ahead words are loaded; `scales_ahead`: scales with them.
    """

    height: int
    warps: int
    resident: int
    depth: int = 1
    scales_ahead: bool = False


@dataclass(frozen=True)
class ManyRowsCut:
    """How `many_rows` is cut: rows of x in a tile, warpgroups, times 64 outputs of each.

    `staged`: words and scales are copied into shared memory, many chunks ahead.
    """

    height: int
    groups: int
    times: int
    staged: bool

    @property
    def pieces(self) -> int:
        """How many products of a tile use the same unpacked weight: one has at most 256 rows."""
        return -(-self.height // _MOST_PRODUCT_ROWS)

    @property
    def width(self) -> int:
        """Outputs of a tile."""
        return 64 * self.groups * self.times

    def work(self, num_rows: int, outputs: int, inputs: int, most_blocks: int) -> Work:
        """The distribution of a product of that many rows over the multiprocessors of a GPU."""
        tiles = -(-num_rows // self.height) * (outputs // self.width)
        return Work.of(tiles, inputs // BLOCK, most_blocks)


class Work(ctypes.Structure):
    """The distribution of the tiles of `many_rows`: `waves` of whole ones to all blocks, the remainder in spans of K.

    `groups`: of 128 inputs, in a tile. See `packed_linear.cu`.
    """

    _fields_ = tuple((name, ctypes.c_int) for name in ("blocks", "waves", "rest", "spans", "groups"))

    @classmethod
    def of(cls, tiles: int, groups: int, most_blocks: int) -> Work:
        """The fastest of three: spans that are parts of one tile each, as many spans as blocks, or no spans.

        >>> found = [Work.of(tiles, 224, 132) for tiles in (16, 90, 192, 256)]
        >>> [(work.waves, work.rest, work.spans) for work in found]
        [(0, 16, 128), (0, 90, 132), (1, 60, 120), (2, 0, 0)]
        """
        waves, rest = divmod(tiles, most_blocks)
        whole = cls(min(tiles, most_blocks), waves + (rest > 0), 0, 0, groups)
        if not rest:
            return whole
        parts = min(most_blocks // rest, max(1, groups // 2))
        most_spans = min(most_blocks, rest * groups)  # every span has something to add to a tile
        cut = [cls(most_blocks if waves else spans, waves, rest, spans, groups) for spans in (rest * parts, most_spans)]
        found: Work = min(whole, *cut, key=lambda work: work.time)
        return found

    @property
    def time(self) -> float:
        """In units of a group's products: of the block that works longest, and of adding the spans of a tile."""
        if not self.spans:
            return float(self.waves * self.groups)
        is_within_tiles = self.spans % self.rest == 0
        adding = _ADDING_PARTS if is_within_tiles else _ADDING_SPANS
        return float(self.waves * self.groups + -(-self.rest * self.groups // self.spans) + adding)


# By: tiles of outputs a block, whether there are more blocks than multiprocessors, rows of x in eights.
_FEW = {
    (1, False, 1): FewRowsCut(1, 8, 1),
    (1, False, 2): FewRowsCut(1, 8, 1),
    (2, False, 1): FewRowsCut(2, 6, 2),
    (2, False, 2): FewRowsCut(2, 4, 2),
    (2, True, 1): FewRowsCut(2, 6, 2),
    (2, True, 2): FewRowsCut(2, 4, 2),
    (4, False, 1): FewRowsCut(4, 12, 1),
    (4, False, 2): FewRowsCut(4, 8, 1),
    (4, True, 1): FewRowsCut(4, 6, 2),
    (4, True, 2): FewRowsCut(4, 4, 2),
}
# For `many_rows`: the most rows that one instruction multiplies; heights of a tile that it is compiled for (registers
# hold the sums of 400 rows). Rows that could be multiplied in the time of unpacking a weight; groups in the time of
# writing and adding parts of tiles, and in that of spans that reach into two.
_MOST_PRODUCT_ROWS, _HEIGHTS = 256, (160, 192, 208, 256, 288, 320, 352, 384, 400)
_UNPACKING, _ADDING_PARTS, _ADDING_SPANS = 100, 6, 16
_LONG = 24  # from this many groups of a block, wide tiles whose words are not staged are faster


def few_rows_cut(num_rows: int, outputs: int, bits: int, num_processors: int) -> FewRowsCut:
    tiles = outputs // 16
    most_low = 2.8 if bits == 4 else 3.6
    height = 1 if tiles < most_low * num_processors else 4 if bits <= 4 else 2
    is_crowded = tiles / height >= 1.5 * num_processors
    return _FEW[height, is_crowded and height > 1, -(-num_rows // 8)]


def many_rows_cut(num_rows: int, outputs: int, inputs: int, bits: int, num_processors: int) -> ManyRowsCut:
    """The fastest cut that divides the outputs."""
    if num_rows <= 64 and outputs % 512 == 0:
        return ManyRowsCut(64, 2, 4, bits != 4)  # others would need more registers than there are
    if num_rows <= 128:
        wide = ManyRowsCut(128, 4, 1, False)
        is_long = outputs % wide.width == 0 and wide.work(num_rows, outputs, inputs, num_processors).time >= _LONG
        return wide if is_long else ManyRowsCut(128, 2, 1, True)
    cuts = [ManyRowsCut(height, 2, 1, True) for height in _HEIGHTS]

    def time(cut: ManyRowsCut) -> float:
        return cut.work(num_rows, outputs, inputs, num_processors).time * (cut.height + _UNPACKING)

    return min(cuts, key=time)
