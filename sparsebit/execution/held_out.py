"""`split_samples`: keeps some samples of the data out of a training, to judge the result on them.

The data is split before the first block, so that no block has seen the held-out samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparsebit.execution.sample_rows import independent_rows, is_row_tensor, rows_at
from sparsebit.graph.values.nested import tensors_of

_FEWEST, _MOST = 8, 64
_FEWEST_OF = 4  # the minimum of 8 never takes more than one sample in so many
Inputs = dict[str, Any]


@dataclass(frozen=True)
class HoldOut:
    """Which samples are held out: about this share of them (`num_held`), drawn with the seed."""

    share: float
    seed: int = 0


@dataclass(frozen=True)
class Piece:
    """Some samples of one batch: `rows` of the tensors that have rows (`has_rows`, in their order), or all of it.

    `view`: the number of its view (`image_views.py`); 0: the unchanged samples.
    """

    batch: int
    rows: tuple[int, ...] | None = None
    has_rows: tuple[bool, ...] = ()
    view: int = 0

    def of(self, inputs: Any) -> Any:
        """The piece's part of the inputs of its batch."""
        return inputs if self.rows is None else rows_at(inputs, self.rows, self.has_rows)


@dataclass(frozen=True)
class Split:
    """The pieces for learning, and the held-out ones."""

    learned: tuple[Piece, ...]
    held: tuple[Piece, ...] = ()

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return (*self.learned, *self.held)


def num_held(num_samples: int, share: float) -> int:
    """How many samples are held out: the share, but at least 8 (or a quarter of all, if that is less), and at most 64.

    Fewer than 8 are not enough to judge a block; more than 64 cost time and add hardly anything.

    >>> [num_held(count, 1 / 8) for count in (3, 16, 32, 63, 256, 1024)]
    [0, 4, 8, 8, 32, 64]
    """
    if not share:
        return 0
    return min(max(round(num_samples * share), min(_FEWEST, num_samples // _FEWEST_OF)), _MOST)


def split_samples(
    num_batches: int, inputs_of: Callable[[int], Inputs], run: Callable[[Inputs], Any], hold_out: HoldOut | None
) -> Split:
    """Which samples of the batches are for learning, and which are held out.

    `inputs_of(i)`: the inputs of batch i. `run`: the model on the inputs of a batch. A sample is a row of the inputs
    if the model computes the same for some rows separately as together with the others, which is tested on the first
    batch. Otherwise (no batch dimension, rows that depend on each other, a fixed batch size) it is a whole batch.
    Deterministic for the same data and seed.
    """
    if hold_out is None or not hold_out.share:
        return Split(tuple(Piece(index) for index in range(num_batches)))
    return find_samples(num_batches, inputs_of, run).split(hold_out)


@dataclass(frozen=True)
class BatchSamples:
    """The samples of some batches. `counts`: rows of each batch, 0 if it is one sample; `has_rows`: as in a `Piece`."""

    counts: tuple[int, ...]
    has_rows: tuple[bool, ...]

    def __len__(self) -> int:
        return sum(max(count, 1) for count in self.counts)

    def split(self, hold_out: HoldOut) -> Split:
        """A split with about the given share held out."""
        return self._without(self._shuffled(hold_out.seed)[: num_held(len(self), hold_out.share)])

    def folds(self, count: int) -> tuple[Split, ...]:
        """This many splits; each sample is held out in one of them."""
        order = self._shuffled(0)
        return tuple(self._without(order[first::count]) for first in range(count))

    def _shuffled(self, seed: int) -> list[tuple[int, int]]:
        samples = [(index, row) for index, count in enumerate(self.counts) for row in range(max(count, 1))]
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed)).tolist()
        return [samples[number] for number in order]

    def _without(self, samples: Sequence[tuple[int, int]]) -> Split:
        held = set(samples)

        def pieces(is_held: bool) -> tuple[Piece, ...]:
            found = []
            for index, count in enumerate(self.counts):
                rows = tuple(row for row in range(max(count, 1)) if ((index, row) in held) == is_held)
                if rows:
                    found.append(Piece(index) if len(rows) == max(count, 1) else Piece(index, rows, self.has_rows))
            return tuple(found)

        return Split(pieces(is_held=False), pieces(is_held=True))


def find_samples(num_batches: int, inputs_of: Callable[[int], Any], run: Callable[[Any], Any]) -> BatchSamples:
    """The samples of the batches, by the rule of `split_samples`."""
    has_rows = _which_have_rows(inputs_of(0), run)
    return BatchSamples(tuple(_num_rows(inputs_of(index), has_rows) for index in range(num_batches)), has_rows)


@torch.no_grad()
def _which_have_rows(inputs: Any, run: Callable[[Any], Any]) -> tuple[bool, ...]:
    """For each tensor of the inputs whether its rows are samples; all False if rows are not independent."""
    whole = tensors_of(run(inputs))
    count = next((len(tensor) for tensor in whole if tensor.ndim), 0)
    if not all(is_row_tensor(tensor, count) for tensor in whole):
        return ()
    return independent_rows(inputs, count, whole, run)


def _num_rows(inputs: Any, has_rows: Sequence[bool]) -> int:
    """How many samples a batch has; 0 if it is one sample."""
    tensors = tensors_of(inputs)
    if len(tensors) != len(has_rows):
        return 0
    lengths = {len(tensor) if tensor.ndim else 0 for tensor, flag in zip(tensors, has_rows, strict=True) if flag}
    return lengths.pop() if len(lengths) == 1 else 0
