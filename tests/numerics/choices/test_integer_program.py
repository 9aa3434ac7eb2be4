from __future__ import annotations

import itertools
import math
import os
import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sparsebit.errors import BudgetError, ConfigError, MissingExtraError
from sparsebit.numerics.choices.highs_solver import Found, Solver, _without_prints
from sparsebit.numerics.choices.integer_program import Budget, Solution, choose

optimize = pytest.importorskip("scipy.optimize")
BITS = (2, 4, 8)


def problem(seed: int, num_items: int = 5) -> tuple[dict[str, list[float]], Budget, Budget]:
    """Costs that fall with the bits, bytes, and products of neighbours' bits."""
    rng = random.Random(seed)
    names = [f"item{place}" for place in range(num_items)]
    costs = {name: sorted((rng.lognormvariate(0, 3) for _ in BITS), reverse=True) for name in names}
    sizes = {name: [rng.randint(1, 50) * bits for bits in BITS] for name in names}
    products = {
        pair: [[rng.randint(1, 9) * a * b for b in BITS] for a in BITS] for pair in itertools.pairwise(names[:4])
    }
    return costs, Budget("bytes", 0.0, sizes), Budget("bops", 0.0, {}, products)


def best_of_all(costs, budgets, ties=()):  # type: ignore[no-untyped-def]
    found = math.inf
    for options in itertools.product(*(range(len(row)) for row in costs.values())):
        chosen = dict(zip(costs, options, strict=True))
        if any(len({chosen[item] for item in tie}) > 1 for tie in ties):
            continue
        if all(budget.spent(chosen) <= budget.limit for budget in budgets):
            found = min(found, sum(row[chosen[item]] for item, row in costs.items()))
    return found


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("ties", [(), (("item0", "item3"), ("item3", "item1"))], ids=["free", "tied"])
def test_is_the_best_of_all_choices(seed: int, ties: tuple[tuple[str, ...], ...]) -> None:
    costs, size, product = problem(seed)
    smallest, largest = dict.fromkeys(costs, 0), dict.fromkeys(costs, 2)
    budgets = [
        Budget(b.name, 0.6 * b.spent(smallest) + 0.4 * b.spent(largest), b.costs, b.pair_costs) for b in (size, product)
    ]
    found = choose(costs, budgets, ties=ties)
    assert found.cost == pytest.approx(best_of_all(costs, budgets, ties))
    assert found.gap < 1e-6
    assert all(len({found.options[item] for item in tie}) == 1 for tie in ties)
    assert all(found.spent[b.name] == b.spent(found.options) <= b.limit for b in budgets)
    assert choose(costs, budgets, ties=ties) == found


def test_without_budgets_each_item_takes_its_cheapest_option() -> None:
    assert choose({"a": [3.0, 1.0], "b": [0.0, 2.0]}).options == {"a": 1, "b": 0}


def test_a_limit_that_is_met_exactly_is_kept() -> None:
    """As of all layers at the bits whose bytes are the budget."""
    rng = random.Random(0)
    sizes = {f"item{place}": [rng.randint(1, 10**7) * bits / 8 for bits in (2, 3, 4)] for place in range(60)}
    costs = {item: [5.0, 4.0, 0.0] for item in sizes}
    limit = sum(row[2] for row in sizes.values())
    assert set(choose(costs, [Budget("bytes", limit, sizes)]).options.values()) == {2}
    assert set(choose(costs, [Budget("bytes", limit - 0.5, sizes)]).options.values()) != {2}


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_costs_of_any_magnitude_are_compared(scale: float) -> None:
    costs = {"a": [2.001 * scale, 0.0], "b": [2.0 * scale, 0.0]}
    found = choose(costs, [Budget("bytes", 3, {"a": [1, 2], "b": [1, 2]})])
    assert found.options == {"a": 1, "b": 0}


def test_an_option_of_infinite_cost_is_not_taken() -> None:
    assert choose({"a": [math.inf, 5.0, math.inf]}).options == {"a": 1}
    with pytest.raises(ConfigError, match=r"costs of 'a': .* not infinity for all options"):
        choose({"a": [math.inf, math.inf]})


def test_a_tie_is_one_choice_and_a_pair_in_it_costs_its_diagonal() -> None:
    budget = Budget("bops", 4, {}, {("a", "b"): [[0, 9, 9], [9, 4, 9], [9, 9, 16]]})
    found = choose({"a": [9.0, 2.0, 0.0], "b": [9.0, 2.0, 0.0]}, [budget], ties=[("a", "b")])
    assert found.options == {"a": 1, "b": 1}
    assert found.spent == {"bops": 4}


def test_budgets_that_cannot_be_kept_say_what_can() -> None:
    costs = {"a": [1.0, 0.0], "b": [1.0, 0.0]}
    small = Budget("bytes", 3, {"a": [2, 4], "b": [2, 4]})
    with pytest.raises(BudgetError, match="bytes: 3 allowed, 4 is the least that the options reach"):
        choose(costs, [small])
    # Each can be kept alone: the one wants the first options, the other the second ones.
    opposite = [Budget("bytes", 4, {"a": [2, 4], "b": [2, 4]}), Budget("loss", 1, {"a": [2, 0], "b": [2, 0]})]
    with pytest.raises(BudgetError, match="bytes: 4 allowed, 8 is the least within the limits of loss"):
        choose(costs, opposite)
    with pytest.raises(BudgetError, match="some tied items have no option"):
        choose({"a": [math.inf, 0.0], "b": [1.0, math.inf]}, ties=[("a", "b")])


def test_the_least_that_is_told_is_the_least() -> None:
    sizes, (loss,) = large_problem()
    least = choose(sizes, [loss]).cost
    with pytest.raises(
        BudgetError, match=rf"size: .* allowed, {least:.6g} is the least within the limits of {loss.name}"
    ):
        choose(sizes, [Budget("size", 0.99 * least, sizes), loss])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({"a": []},), "costs of 'a'"),
        (({"a": [math.nan]},), "no NaN"),
        (({"a": [1.0]}, [Budget("bytes", 1, {"a": [1, 2]})]), r"one number of at least 0 per option \(1\)"),
        (({"a": [1.0]}, [Budget("bytes", 1, {"a": [-1]})]), "at least 0"),
        (({"a": [1.0]}, [Budget("bytes", 1, {}, {("a", "a"): [[math.inf]]})]), "at least 0"),
        (({"a": [1.0]}, [Budget("bytes", math.nan, {"a": [1]})]), "limit nan"),
    ],
)
def test_what_is_no_program_is_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose(*arguments)  # type: ignore[arg-type]


def test_the_extra_is_named_where_scipy_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(MissingExtraError, match=r"pip install "):
        choose({"a": [1.0]})


def large_problem() -> tuple[dict[str, list[float]], list[Budget]]:
    rng = random.Random(3)
    costs = {f"i{n}": [rng.lognormvariate(0, 2) * 4.0**-b for b in (2, 3, 4, 8)] for n in range(120)}
    sizes = {item: [rng.randint(10, 10**5) * b for b in (2, 3, 4, 8)] for item in costs}
    return costs, [Budget("bytes", 0.5 * sum(row[-1] for row in sizes.values()), sizes)]


def test_nothing_is_printed_and_a_gap_that_is_allowed_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    costs, budgets = large_problem()
    found = choose(costs, budgets, gap=0.01)
    assert found.gap <= 0.01
    assert found.bound <= choose(costs, budgets).cost * (1 + 1e-9) <= found.cost * (1 + 1e-9)
    assert capfd.readouterr().out == ""


def test_a_choice_that_is_near_enough_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    integer, calls = Solver.integer, []

    def counted(solver: Solver, kept: set[int], least: float, gap: float) -> Found | None:
        calls.append(gap)
        return integer(solver, kept, least, gap)

    monkeypatch.setattr(Solver, "integer", counted)
    choose(*large_problem(), gap=0.01)
    assert len(calls) == 1


def test_a_budget_of_pairs_leaves_few_options_to_the_integer_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without bounds of their own, options that stand in pairs could not be told apart, and all were tried."""
    numbers, bits = random.Random(0), (2, 3, 4, 5, 6, 8)
    costs = {f"{kind}{i}": [numbers.random() * 4.0**-b for b in bits] for kind in "wa" for i in range(60)}
    pairs = {(f"w{i}", f"a{i // 2 * 2}"): [[a * b * (1.0 + i % 7) for b in bits] for a in bits] for i in range(60)}
    limit = 20 * sum(1.0 + i % 7 for i in range(60))
    tried: list[int] = []
    integer = Solver.integer

    def counted(solver: Solver, kept: set[int], least: float, gap: float) -> Found | None:
        tried.append(len(kept))
        return integer(solver, kept, least, gap)

    monkeypatch.setattr(Solver, "integer", counted)
    found = choose(costs, [Budget("bops", limit, {}, pairs)], gap=1e-3)
    assert 0 < found.gap <= 1e-3 and found.spent["bops"] <= limit
    assert max(tried) < 400  # of 720


def test_a_time_limit_keeps_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = random.Random(0)
    costs = {str(i): [numbers.random() for _ in range(6)] for i in range(60)}
    size = Budget("size", 90, {str(i): [numbers.randrange(6) for _ in range(6)] for i in range(60)})
    integer, calls = Solver.integer, []

    def once(solver: Solver, kept: set[int], least: float, gap: float) -> Found | None:
        calls.append(kept)
        if len(calls) > 1:
            raise BudgetError("no choice was found in 60 s")
        return integer(solver, kept, least, gap)

    monkeypatch.setattr(Solver, "integer", once)
    found = choose(costs, [size])
    assert len(calls) == 2 and found.spent["size"] <= 90 and 0 < found.gap < 0.1


def test_only_lines_of_the_solver_are_not_printed(capfd: pytest.CaptureFixture[str]) -> None:
    with _without_prints():
        os.write(1, b"HighsMipSolverData::transformNewIntegerFeasibleSolution\nanother thread's\n")
    assert capfd.readouterr().out == "another thread's\n"


def test_the_gap_is_relative_to_the_cost() -> None:
    gaps = [Solution({}, cost, bound, {}).gap for cost, bound in ((0.5, 0.25), (0.0, 0.0), (4.0, 3.0))]
    assert gaps == [0.5, 0.0, 0.25]


def test_the_integer_program_is_solved_as_exactly_as_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps: list[float] = []
    milp = optimize.milp

    def watched(*args: Any, options: dict[str, float], **kwargs: Any) -> Any:
        gaps.append(options["mip_rel_gap"])
        return milp(*args, options=options, **kwargs)

    monkeypatch.setattr(optimize, "milp", watched)
    for gap in (0.0, 0.25):
        choose({"a": [3.0, 1.0], "b": [2.0, 1.0]}, [Budget("bytes", 3, {"a": [1, 2], "b": [1, 2]})], gap=gap)
    assert gaps == [0.0, 0.25]


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_reduced_costs_are_in_the_unit_of_the_costs(scale: float) -> None:
    """An option that costs 2 more than the cheapest one can only be in a choice that costs 2 more."""
    rows = [({0: 1.0, 1: 1.0}, 1.0, 1.0)]
    program = SimpleNamespace(num_binary=2, num_variables=2, rows=rows, spending=[], barred=set())
    found = Solver(program, [scale, 3 * scale], [], 60.0).relaxed()
    assert found is not None and found[0] == pytest.approx(scale) and found[1] == pytest.approx([0.0, 2 * scale])


def test_a_limit_of_zero_allows_what_uses_nothing() -> None:
    assert choose({"a": [1.0, 0.0]}, [Budget("bytes", 0, {"a": [0, 4]})]).options == {"a": 0}


def test_pairs_of_items_with_different_numbers_of_options() -> None:
    budget = Budget("bops", 2, {}, {("a", "b"): [[1, 2, 3], [2, 4, 6]]})
    assert choose({"a": [3.0, 0.0], "b": [2.0, 1.0, 0.0]}, [budget]).options == {"a": 1, "b": 0}
