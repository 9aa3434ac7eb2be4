from __future__ import annotations

import itertools
import random

import pytest

from sparsebit.numerics.choices.reduced_costs import option_bounds

TREES = {
    "star": [("a", "b"), ("c", "a"), ("a", "d")],
    "path": [("a", "b"), ("b", "c"), ("d", "c")],
    "two trees": [("b", "a"), ("c", "d")],
    "no pairs": [],
}
CYCLE = [("a", "b"), ("b", "c"), ("c", "d"), ("d", "a")]
COUNTS = {"a": 2, "b": 3, "c": 1, "d": 4}


def program(
    pairs: list[tuple[str, str]], seed: int
) -> tuple[dict[str, int], dict[tuple[str, str], int], list[float], dict[tuple[str, int], float]]:
    """First variables of groups and of pairs, reduced costs, and by enumeration the least sum with each option."""
    numbers = random.Random(seed)
    first, place = {}, 0
    for group, count in COUNTS.items():
        first[group], place = place, place + count
    starts = {}
    for a, b in pairs:
        starts[a, b], place = place, place + COUNTS[a] * COUNTS[b]
    reduced = [numbers.choice([0.0, numbers.random()]) for _ in range(place)]
    best: dict[tuple[str, int], float] = {}
    for options in itertools.product(*(range(count) for count in COUNTS.values())):
        chosen = dict(zip(COUNTS, options, strict=True))
        for group, option in chosen.items():
            joined = component(group, pairs)
            cost = sum(reduced[first[g] + chosen[g]] for g in joined)
            cost += sum(reduced[s + chosen[a] * COUNTS[b] + chosen[b]] for (a, b), s in starts.items() if a in joined)
            best[group, option] = min(cost, best.get((group, option), cost))
    return first, starts, reduced, best


def component(group: str, pairs: list[tuple[str, str]]) -> set[str]:
    found = {group}
    for _ in COUNTS:
        found |= {g for pair in pairs if found & {*pair} for g in pair}
    return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", TREES)
def test_trees_have_the_least_sum_with_each_option(name: str, seed: int) -> None:
    first, starts, reduced, best = program(TREES[name], seed)
    found = option_bounds(COUNTS, first, starts, reduced)
    assert found == pytest.approx([best[group, k] for group, count in COUNTS.items() for k in range(count)])


@pytest.mark.parametrize("seed", range(5))
def test_cycles_have_a_bound_of_it(seed: int) -> None:
    first, starts, reduced, best = program(CYCLE, seed)
    found = option_bounds(COUNTS, first, starts, reduced)
    wanted = [best[group, k] for group, count in COUNTS.items() for k in range(count)]
    assert all(a <= b + 1e-12 for a, b in zip(found, wanted, strict=True))
    assert max(found) > 0
