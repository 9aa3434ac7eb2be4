"""The exact split against all splits."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from sparsebit.quantization.placement_search.minimum_cut import cheapest_split


def cost(
    sides: tuple[bool, ...],
    ours: list[float],
    theirs: list[float],
    edges: list[tuple[int, int, float]],
    both_ways: bool = True,
) -> float:
    nodes = sum(mine if is_ours else other for is_ours, mine, other in zip(sides, ours, theirs, strict=True))
    cut = [price for a, b, price in edges if sides[a] != sides[b] and (both_ways or sides[a])]
    return nodes + sum(cut)


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_no_split_is_cheaper(seed: int, both_ways: bool) -> None:
    draw = random.Random(seed)
    size = 7
    ours = [draw.choice([draw.random(), math.inf]) for _ in range(size)]
    theirs = [draw.random() for _ in range(size)]
    pairs = itertools.combinations(range(size), 2) if both_ways else itertools.permutations(range(size), 2)
    edges = [(a, b, draw.random() / 2) for a, b in pairs if draw.random() < 0.5]
    found = cheapest_split(ours, theirs, edges, both_ways=both_ways)
    least = min(cost(sides, ours, theirs, edges, both_ways) for sides in itertools.product((True, False), repeat=size))
    assert cost(found, ours, theirs, edges, both_ways) == pytest.approx(least)


def test_a_chain_of_a_thousand_nodes() -> None:
    edges = [(place, place + 1, 1e-3) for place in range(999)]
    ours = [0.0 if place < 500 else 1.0 for place in range(1000)]
    theirs = [1.0 - one for one in ours]
    assert cheapest_split(ours, theirs, edges) == tuple(place < 500 for place in range(1000))
