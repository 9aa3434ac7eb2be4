"""Masks inside one weight: single elements, blocks, or N of every M.

The rounding rule: of n numbers (or blocks), `floor(ratio * n + 0.5)` are pruned, those with the lowest scores; among
equal scores the first ones.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch
from torch import Tensor


def num_pruned(ratio: float, count: int) -> int:
    """How many of `count` a ratio prunes: rounded to the nearest, halves up.

    >>> num_pruned(0.5, 5), num_pruned(0.3, 10), num_pruned(1.0, 4)
    (3, 3, 4)
    """
    return min(count, math.floor(ratio * count + 0.5))


def lowest(scores: Tensor, count: int) -> Tensor:
    """True for all but the `count` lowest scores; among equal ones the first are pruned."""
    mask = torch.ones(scores.numel(), dtype=torch.bool, device=scores.device)
    mask[scores.flatten().sort(stable=True).indices[:count]] = False
    return mask.view_as(scores)


def lowest_of_all(scores: Sequence[Tensor], count: int) -> list[Tensor]:
    """The same over several tensors together."""
    flat = lowest(torch.cat([score.flatten() for score in scores]), count)
    parts = flat.split([score.numel() for score in scores])
    return [part.view_as(score) for part, score in zip(parts, scores, strict=True)]


def n_of_m(granularity: str) -> tuple[int, int] | None:
    """`"2:4"` -> (2, 4): of every 4 neighbours along a row, 2 stay."""
    return _two_numbers(granularity, ":")


def block_shape(granularity: str) -> tuple[int, int] | None:
    """`"4x1"` -> (4, 1): blocks of 4 rows and 1 column."""
    return _two_numbers(granularity, "x")


def _two_numbers(text: str, between: str) -> tuple[int, int] | None:
    found = re.fullmatch(rf"(\d+){between}(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def n_of_m_mask(scores: Tensor, n: int, m: int) -> Tensor:
    """In every m neighbours along the flattened columns of each row, keeps the n highest; a remainder is kept whole."""
    rows = scores.flatten(1)
    width = rows.shape[1] // m * m
    groups = rows[:, :width].unflatten(1, (-1, m)) if width else rows.new_zeros(rows.shape[0], 0, m)
    lowest = groups.sort(dim=-1, stable=True).indices[..., : m - n]
    mask = torch.ones_like(rows, dtype=torch.bool)
    mask[:, :width] = torch.ones_like(groups, dtype=torch.bool).scatter_(-1, lowest, False).flatten(1)
    return mask.view_as(scores)


def block_scores(scores: Tensor, block: tuple[int, int]) -> Tensor:
    """The sum of every block of the matrix (rows, columns x kernel); blocks at the edges may be smaller."""
    rows = scores.flatten(1)
    height, width = -(-rows.shape[0] // block[0]), -(-rows.shape[1] // block[1])
    padded = rows.new_zeros(height * block[0], width * block[1])
    padded[: rows.shape[0], : rows.shape[1]] = rows
    return padded.view(height, block[0], width, block[1]).sum((1, 3))


def from_blocks(blocks: Tensor, block: tuple[int, int], like: Tensor) -> Tensor:
    """The mask of elements that corresponds to a mask of blocks."""
    rows = like.flatten(1)
    wide = blocks.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return wide[: rows.shape[0], : rows.shape[1]].reshape(like.shape)
