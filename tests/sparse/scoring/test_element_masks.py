"""Masks inside a weight: exact numbers, ties, blocks and N of M."""

from __future__ import annotations

import pytest
import torch

from sparsebit.sparse.scoring.element_masks import (
    block_scores,
    from_blocks,
    lowest,
    lowest_of_all,
    n_of_m_mask,
    num_pruned,
)


@pytest.mark.parametrize(("ratio", "count", "pruned"), [(0.5, 5, 3), (0.3, 10, 3), (0, 7, 0), (1, 7, 7), (0.05, 9, 0)])
def test_the_rounding_rule(ratio: float, count: int, pruned: int) -> None:
    assert num_pruned(ratio, count) == pruned
    assert int((~lowest(torch.rand(count), pruned)).sum()) == pruned


def test_of_equal_scores_the_first_go() -> None:
    assert lowest(torch.tensor([1.0, 0.0, 1.0, 1.0]), 2).tolist() == [False, False, True, True]


def test_several_tensors_share_one_number() -> None:
    one, other = lowest_of_all([torch.tensor([5.0, 1.0]), torch.tensor([[2.0], [9.0]])], 2)
    assert one.tolist() == [True, False] and other.tolist() == [[False], [True]]


def test_two_of_four() -> None:
    scores = torch.tensor([[4.0, 1.0, 3.0, 2.0, 7.0]])
    assert n_of_m_mask(scores, 2, 4).tolist() == [[True, False, True, False, True]]
    mask = n_of_m_mask(torch.rand(6, 4, 3, 3), 4, 8).flatten(1)
    assert mask[:, :32].unflatten(1, (-1, 8)).sum(-1).eq(4).all() and mask[:, 32:].all()


def test_blocks_with_a_rest() -> None:
    scores = torch.ones(5, 3)
    sums = block_scores(scores, (2, 2))
    assert sums.tolist() == [[4, 2], [4, 2], [2, 1]]
    mask = from_blocks(lowest(sums, 2), (2, 2), scores)
    assert int((~mask).sum()) == 3 and not mask[4, 2] and not mask[:2, 2].any()
