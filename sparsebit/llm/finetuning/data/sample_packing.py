"""Rows of several samples: which samples share a row, and the tokens, positions and targets of a batch of rows.

Positions begin at 0 in each sample. transformers treats this as the border between samples and lets none of them
attend to another (`check_packing` tries it on the model); the padding after the last sample of a row is one more
sample, without targets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsebit.errors import ConfigError
from sparsebit.graph.state.modes import evaluating
from sparsebit.llm.finetuning.data.instructions import Sample

IGNORED = -100  # the target of a position that is not learned
_NUM_OPEN = 64  # rows that are filled at the same time


@dataclass(frozen=True)
class Batch:
    """`tokens`, `positions`, `targets`: `(rows, length)`; the target of a position is the token after it."""

    tokens: Tensor
    positions: Tensor
    targets: Tensor

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
        for sample in (samples[number] for number in row):
            size, values = len(sample.tokens), torch.tensor(sample.tokens)
            tokens[place, start : start + size] = values
            positions[place, start : start + size] = torch.arange(size)
            learned = torch.tensor(sample.is_learned)[1:]
            targets[place, start : start + size - 1] = torch.where(learned, values[1:], IGNORED)
            start += size
        positions[place, start:] = torch.arange(width - start)
    return Batch(tokens, positions, targets)


_LENGTH = 12


@torch.no_grad()
def check_packing(model: Any, samples: Sequence[Sample], outputs: Callable[[Batch], Tensor]) -> None:
    """Raise if a sample has other outputs (at each position of a batch) after two other samples of its row than alone:
    the model ignores positions that begin again, and would train each sample with its neighbours in view.
    """
    tokens = [token for sample in samples[:8] for token in sample.tokens]
    if len(tokens) < 3:
        return
    tokens = (tokens * (3 * _LENGTH))[: 3 * _LENGTH]
    first, second, seen = (_all_learned(tokens[n * _LENGTH : (n + 1) * _LENGTH]) for n in range(3))
    other = _all_learned([*reversed(first.tokens[1:]), second.tokens[0]])
    device = next(one.device for one in model.parameters() if not one.is_meta)

    def of_last(*row: Sample) -> Tensor:
        return outputs(make_batch(row, [list(range(len(row)))], 0).to(device))[0, -_LENGTH:]

    with evaluating(model):
        alone, behind, elsewhere = of_last(seen), of_last(first, second, seen), of_last(other, second, seen)
    size = alone.abs().max().clamp(min=1e-30)
    allowed = 1e-3 if alone.dtype == torch.float32 else 5e-2
    moved, leaked = float((behind - alone).abs().max() / size), float((behind - elsewhere).abs().max() / size)
    if not (moved <= allowed and leaked <= 1e-4):
        raise ConfigError(
            f"packing: {type(model).__name__} computes other values for a sample that shares its row (by "
            f"{max(moved, leaked):.2g} of the largest): samples would see each other; switch packing off (--no-packing)"
        )


def _all_learned(tokens: Sequence[int]) -> Sample:
    return Sample(tuple(tokens), (True,) * len(tokens))
