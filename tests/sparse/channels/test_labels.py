"""Sets of labels: joined in bulk they are what joining one by one gives."""

from __future__ import annotations

import torch

from sparsebit.sparse.channels.labels import FIXED, FREE, LabelSets


def _sets(size: int = 12) -> tuple[LabelSets, torch.Tensor]:
    sets = LabelSets()
    return sets, sets.add_axis("a", 0, size)


def test_pairs_with_common_partners_become_one_set() -> None:
    sets, a = _sets()
    # 8 has three partners at once, which have others among themselves.
    sets.join_pairwise(a[[7, 7, 7, 1, 4]], a[[3, 1, 5, 9, 5]], "x")
    assert {sets.find(int(label)) for label in a[[7, 3, 1, 5, 9, 4]]} == {int(a[1])}
    assert sets.find(int(a[0])) == int(a[0])


def test_random_joins_are_what_a_plain_union_gives() -> None:
    generator = torch.Generator().manual_seed(0)
    sets, a = _sets(40)
    parent = list(range(41))
    for _ in range(6):
        pairs = a[torch.randint(0, 40, (2, 5), generator=generator)]
        sets.join_pairwise(pairs[0], pairs[1], "x")
        for one, other in pairs.t().tolist():
            low, high = sorted((parent[one], parent[other]))
            parent = [low if entry == high else entry for entry in parent]
    assert sets.roots().tolist() == parent


def test_a_pin_follows_its_set_and_the_first_reason_wins() -> None:
    sets, a = _sets()
    sets.pin(a[[5]], "first")
    sets.join_rows(a[[5, 2]][None], "y")
    sets.pin(a[[2, 3]], "second")
    assert sets.reasons() == {int(a[2]): "first", int(a[3]): "second"}
    sets.join_pairwise(a[[0, 0]], a[[2, 3]], "y")
    assert set(sets.reasons()) == {int(a[0])}


def test_rows_with_fixed_and_free_labels() -> None:
    sets, a = _sets()
    rows = torch.tensor([[FREE, int(a[0]), int(a[4])], [FIXED, int(a[1]), FREE], [FREE, FREE, FIXED]])
    sets.join_rows(rows, "stays")
    assert sets.find(int(a[4])) == int(a[0])
    assert sets.reasons() == {int(a[1]): "stays"}


def test_axes_grow_beyond_the_first_memory() -> None:
    sets = LabelSets()
    axes = [sets.add_axis("a", dim, 700) for dim in range(4)]
    sets.join_pairwise(axes[0], axes[3], "x")
    assert torch.equal(sets.roots(axes[3]), axes[0]) and len(sets) == 2801
