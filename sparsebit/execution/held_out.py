"""`split_samples`: some samples of the data are kept out of a training, to judge what was learned on the others.

The data is split in front of the first block, so that no block has seen the held-out samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparsebit.execution.sample_rows import independent_rows, is_row_tensor, rows_at
from sparsebit.graph.nested import tensors_of

_FEWEST, _MOST = 8, 64
_FEWEST_OF = 4  # to reach the fewest, at most one sample of so many
Inputs = dict[str, Any]


@dataclass(frozen=True)
class HoldOut:
    """Which samples are held out: about this share of them (`num_held`), drawn with the seed."""

    share: float
    seed: int = 0


@dataclass(frozen=True)
class Piece:
    """Some samples of one batch: `rows` of the tensors that have rows (`has_rows`, in their order), or all of it.

    `view`: which one of its views (`image_views.py`); 0: the samples as they are.
    """

    batch: int
    rows: tuple[int, ...] | None = None
    has_rows: tuple[bool, ...] = ()
    view: int = 0

    def of(self, inputs: Inputs) -> Inputs:
        """What the piece is of the inputs of its batch."""
        cut: Inputs = inputs if self.rows is None else rows_at(inputs, self.rows, self.has_rows)
        return cut


@dataclass(frozen=True)
class Split:
    """The pieces that are learned from, and those that are held out."""

    learned: tuple[Piece, ...]
    held: tuple[Piece, ...] = ()

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return (*self.learned, *self.held)


def num_held(num_samples: int, share: float) -> int:
    """How many samples are held out: the share, but at least 8 (or a quarter of all, if that is less), and at most 64.

    Fewer than 8 say little of a block; more than 64 cost time and say hardly more.

    >>> [num_held(count, 1 / 8) for count in (3, 16, 32, 63, 256, 1024)]
    [0, 4, 8, 8, 32, 64]
    """
    if not share:
        return 0
    return min(max(round(num_samples * share), min(_FEWEST, num_samples // _FEWEST_OF)), _MOST)


def split_samples(
    num_batches: int, inputs_of: Callable[[int], Inputs], run: Callable[[Inputs], Any], hold_out: HoldOut | None
) -> Split:
    """Which samples of the batches are learned from, and which are held out.

    `inputs_of(i)`: the inputs of batch i. `run`: the model on the inputs of a batch. A sample is a row of the inputs
    where the model computes for some rows alone what it computes for them among the others, which is tried on the first
    batch. Otherwise (no batch dimension, rows that depend on each other, a fixed batch size) it is a whole batch.
    Always the same for the same data and seed.
    """
    if hold_out is None or not hold_out.share:
        return Split(tuple(Piece(index) for index in range(num_batches)))
    has_rows = _which_have_rows(inputs_of(0), run)
    counts = [_num_rows(inputs_of(index), has_rows) for index in range(num_batches)]
    samples = [(index, row) for index, count in enumerate(counts) for row in range(max(count, 1))]
    generator = torch.Generator().manual_seed(hold_out.seed)
    order = torch.randperm(len(samples), generator=generator).tolist()
    held = {samples[number] for number in order[: num_held(len(samples), hold_out.share)]}

    def pieces(is_held: bool) -> tuple[Piece, ...]:
        found = []
        for index, count in enumerate(counts):
            rows = tuple(row for row in range(max(count, 1)) if ((index, row) in held) == is_held)
            if rows:
                found.append(Piece(index) if len(rows) == max(count, 1) else Piece(index, rows, has_rows))
        return tuple(found)

    return Split(pieces(is_held=False), pieces(is_held=True))


@torch.no_grad()
def _which_have_rows(inputs: Inputs, run: Callable[[Inputs], Any]) -> tuple[bool, ...]:
    """Of each tensor of the inputs whether its rows are samples; of none where rows are not independent."""
    whole = tensors_of(run(inputs))
    count = next((len(tensor) for tensor in whole if tensor.ndim), 0)
    if not all(is_row_tensor(tensor, count) for tensor in whole):
        return ()
    return independent_rows(inputs, count, whole, run)


def _num_rows(inputs: Inputs, has_rows: Sequence[bool]) -> int:
    """How many samples a batch has; 0 where it is one."""
    tensors = tensors_of(inputs)
    if not has_rows or len(tensors) != len(has_rows):
        return 0
    lengths = {len(tensor) if tensor.ndim else 0 for tensor, flag in zip(tensors, has_rows, strict=True) if flag}
    return lengths.pop() if len(lengths) == 1 else 0
