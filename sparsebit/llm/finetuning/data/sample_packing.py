"""Rows of several samples: which samples share a row, and the tokens, positions and targets of a batch of rows.

Positions begin at 0 in each sample. transformers treats this as the border between samples and lets none of them
attend to another; the padding after the last sample of a row is one more sample, without targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsebit.llm.finetuning.data.instructions import Sample

IGNORED = -100  # the target of a position that is not learned
_NUM_OPEN = 64  # rows that are filled at the same time


@dataclass(frozen=True)
class Batch:
    """`tokens`, `positions`, `targets`: `(rows, length)`; the target of a position is the token after it."""

    tokens: Tensor
    positions: Tensor
    targets: Tensor

    @property
    def num_targets(self) -> int:
        return int((self.targets != IGNORED).sum())

    def to(self, device: torch.device) -> Batch:
        return Batch(self.tokens.to(device), self.positions.to(device), self.targets.to(device))


def pack_samples(samples: Sequence[Sample], order: Sequence[int], length: int, *, packing: bool) -> list[list[int]]:
    """The samples of each row, taken in `order`; with `packing` as many as fit, each in the row that it fills best."""
    if not packing:
        return [[number] for number in order]
    rows: list[list[int]] = []
    space: dict[int, int] = {}  # of the open rows, oldest first
    for number in order:
        size = len(samples[number].tokens)
        fitting = [row for row, left in space.items() if left >= size]
        if fitting:
            row = min(fitting, key=lambda one: space[one])
        else:
            row = len(rows)
            rows.append([])
            space[row] = length
        rows[row].append(number)
        space[row] -= size
        if space[row] == 0:
            del space[row]
        elif len(space) > _NUM_OPEN:
            del space[next(iter(space))]
    return rows


def plan_epochs(
    samples: Sequence[Sample], length: int, *, packing: bool, num_epochs: int, batch_size: int, seed: int
) -> list[list[list[int]]]:
    """For each step of the training its rows, for each row its samples; every epoch has another order."""
    steps: list[list[list[int]]] = []
    for epoch in range(num_epochs):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(len(samples), generator=generator).tolist()
        rows = pack_samples(samples, order, length, packing=packing)
        steps += [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    return steps


def make_batch(samples: Sequence[Sample], rows: Sequence[Sequence[int]], pad_token: int, *, width: int = 0) -> Batch:
    """The rows of one batch, as long as the longest of them, or as `width` if that is more; a row may be empty."""
    width = max(width, *(sum(len(samples[number].tokens) for number in row) for row in rows))
    tokens = torch.full((len(rows), width), pad_token)
    positions = torch.zeros_like(tokens)
    targets = torch.full_like(tokens, IGNORED)
    for place, row in enumerate(rows):
        start = 0
        for number in row:
            sample = samples[number]
            size = len(sample.tokens)
            values = torch.tensor(sample.tokens)
            tokens[place, start : start + size] = values
            positions[place, start : start + size] = torch.arange(size)
            learned = torch.tensor(sample.is_learned)[1:]
            targets[place, start : start + size - 1] = torch.where(learned, values[1:], IGNORED)
            start += size
        positions[place, start:] = torch.arange(width - start)
    return Batch(tokens, positions, targets)
