"""One option per item with the least sum of costs, under budgets: an exact integer program.

    minimize  sum_i sum_k cost[i][k] x[i][k]
    with      sum_k x[i][k] = 1                                    for each item i
              sum_i sum_k spent[i][k] x[i][k] + pairs <= limit     for each budget
              x[i][k] in {0, 1}

This is the multiple-choice knapsack problem (Kellerer, Pferschy, Pisinger: Knapsack Problems, chapter 11), with several
budgets. Costs of two items together (`pair_costs`) are linear in one variable `z[k][l]` per pair of options, whose
sums over k and over l are the items' own variables. The solver is HiGHS, in scipy (`highs_solver`).

The program with fractions is solved first. Its reduced costs (`reduced_costs.py`) bound what an option costs at least,
so most options can be excluded once a good choice is known, and a small integer program remains (`_Program._solved`).
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sparsebit.errors import BudgetError, ConfigError
from sparsebit.numerics.choices.highs_solver import Row, Solver
from sparsebit.numerics.choices.reduced_costs import option_bounds

Pair = tuple[str, str]
Costs = Mapping[str, Sequence[float]]  # of each option of each item
# The integer program is first tried with so many options more than one per item.
_CORE = 64
# The gap of these first solutions: they only serve to exclude options.
_CORE_GAP = 2e-5
# A budget counts as kept if only the rounding errors of a sum exceed it.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Budget:
    """An upper bound on the sum of what the chosen options use.

    `costs[item][option]`: a missing item uses nothing. `pair_costs[(a, b)][option of a][option of b]`: the amount that
    two items use together, in addition. All of them are at least 0.
    """

    name: str
    limit: float
    costs: Costs
    pair_costs: Mapping[Pair, Sequence[Sequence[float]]] = field(default_factory=dict)

    def spent(self, options: Mapping[str, int]) -> float:
        """The amount that these options use."""
        single = [row[options[item]] for item, row in self.costs.items()]
        return math.fsum([*single, *(table[options[a]][options[b]] for (a, b), table in self.pair_costs.items())])


@dataclass(frozen=True)
class Solution:
    """The option of each item. `cost`: the sum of their costs. `bound`: no choice costs less, as the solver proved.

    `spent`: the used amount of each budget.
    """

    options: Mapping[str, int]
    cost: float
    bound: float
    spent: Mapping[str, float]

    @property
    def gap(self) -> float:
        """How much less the best choice might cost, relative to this one; 0 if this one is proven to be the best."""
        return max(0.0, self.cost - self.bound) / self.cost if self.cost > 0 else 0.0


def choose(
    costs: Costs,
    budgets: Sequence[Budget] = (),
    *,
    ties: Iterable[Iterable[str]] = (),
    gap: float = 0.0,
    time_limit: float = 60.0,
) -> Solution:
    """The cheapest option of each item, within all budgets.

    `costs[item][option]`: infinity for an option that the item must not take. `ties`: items that must take the same
    option. `gap`: a choice that is proven to be as near to the best as this (0.001: 0.1 %) is good enough.
    `time_limit`: seconds, after which the best choice so far is returned; its own `gap` is the proven one. Budgets
    that cannot be kept are a `BudgetError` that names the least that can be reached. Deterministic, unless the time
    limit ends the search.

    >>> costs = {"a": [9.0, 2.0, 0.0], "b": [2.0, 1.0, 0.0]}
    >>> size = Budget("bytes", 12, {"a": [2, 4, 8], "b": [2, 4, 8]})
    >>> choose(costs, [size]).options
    {'a': 2, 'b': 1}
    """
    groups = _merged(costs, ties)
    _check(costs, budgets, groups)
    program = _Program(costs, budgets, groups)
    found = program.solve(gap, time_limit)
    if found is None:
        raise BudgetError(_why_not(program, budgets, time_limit))
    options, bound = found
    cost = math.fsum(row[options[item]] for item, row in costs.items())
    return Solution(options, cost, min(bound, cost), {budget.name: budget.spent(options) for budget in budgets})


class _Program:
    """The program in the solver's form: a variable per option of each group of tied items, then those of pairs."""

    def __init__(self, costs: Costs, budgets: Sequence[Budget], groups: Mapping[str, str]) -> None:
        self.groups, self.budgets = groups, budgets
        self.num_options = {group: len(costs[group]) for group in groups.values()}
        *starts, self.num_binary = itertools.accumulate(self.num_options.values(), initial=0)
        self.first = dict(zip(self.num_options, starts, strict=True))  # the first variable of each group
        self.num_variables = self.num_binary
        self.objective = [0.0] * self.num_variables
        for item, row in costs.items():
            for option, cost in enumerate(row):
                self.objective[self.first[groups[item]] + option] += cost
        self.pairs: dict[Pair, int] = {}  # the first variable of each pair of groups
        self.rows: list[Row] = [
            (dict.fromkeys(range(self.first[group], self.first[group] + count), 1.0), 1.0, 1.0)
            for group, count in self.num_options.items()
        ]
        self.barred = {place for place, cost in enumerate(self.objective) if math.isinf(cost)}
        self.objective = [0.0 if math.isinf(cost) else cost for cost in self.objective]
        self.spending = [self._coefficients(budget) for budget in budgets]

    def _coefficients(self, budget: Budget) -> dict[int, float]:
        found: dict[int, float] = defaultdict(float)
        for item, row in budget.costs.items():
            for option, cost in enumerate(row):
                found[self.first[self.groups[item]] + option] += cost
        for (a, b), table in budget.pair_costs.items():
            one, other = self.groups[a], self.groups[b]
            for i, row in enumerate(table):
                for j, cost in enumerate(row):
                    if one != other:
                        found[self._pair(one, other, i, j)] += cost
                    elif i == j:
                        found[self.first[one] + i] += cost
        return {place: float(value) for place, value in found.items() if value}

    def _pair(self, one: str, other: str, i: int, j: int) -> int:
        """The variable that is 1 if both groups take these options."""
        if (other, one) in self.pairs:
            one, other, i, j = other, one, j, i
        n, m = self.num_options[one], self.num_options[other]
        if (one, other) not in self.pairs:
            start = self.pairs[one, other] = self.num_variables
            self.num_variables += n * m
            self.objective += [0.0] * (n * m)
            own = [(self.first[one] + k, range(start + k * m, start + (k + 1) * m)) for k in range(n)]
            own += [(self.first[other] + k, range(start + k, start + n * m, m)) for k in range(m)]
            self.rows += [(dict.fromkeys(variables, 1.0) | {option: -1.0}, 0.0, 0.0) for option, variables in own]
        return self.pairs[one, other] + i * m + j

    def solve(self, gap: float, time_limit: float) -> tuple[dict[str, int], float] | None:
        """The options and a lower bound of their cost; None if the budgets cannot be kept."""
        limits = [budget.limit for budget in self.budgets]
        bound = math.inf
        for _ in range(4):
            found = self._solved(self.objective, limits, gap, time_limit)
            if found is None:
                return None
            options, bound = found[0], min(bound, found[1])
            over = [b.spent(options) > b.limit + _ROUNDING * abs(b.limit) for b in self.budgets]
            if not any(over):
                return options, bound
            # Within the solver's tolerance a budget is exceeded slightly: try again with a slightly smaller limit.
            limits = [b - 2e-6 * abs(b) if is_over else b for b, is_over in zip(limits, over, strict=True)]
        return None

    def least(self, place: int, kept: Container[int], time_limit: float) -> float | None:
        """The least amount of one budget while those at `kept` hold; None if they cannot."""
        objective = [0.0] * self.num_variables
        for variable, value in self.spending[place].items():
            objective[variable] = value
        limits = [budget.limit if other in kept else math.inf for other, budget in enumerate(self.budgets)]
        found = self._solved(objective, limits, 1e-6, time_limit)
        return None if found is None else self.budgets[place].spent(found[0])

    def _solved(
        self, objective: Sequence[float], limits: Sequence[float], gap: float, time_limit: float
    ) -> tuple[dict[str, int], float] | None:
        """Least sum of `objective`. The relaxed program is solved first, and excludes options that cannot be in the
        best choice once a good one is known (reduced cost beyond the difference): few remain for the integer program.
        """
        if any(limit < 0 for limit in limits):
            return None
        solver = Solver(self, objective, limits, time_limit)
        relaxed = solver.relaxed()
        if relaxed is None:
            return None
        least, reduced = relaxed
        extra = option_bounds(self.num_options, self.first, self.pairs, reduced)
        by_cost = sorted(range(self.num_binary), key=lambda place: extra[place])
        num_beside, chosen, best, bound = _CORE, None, math.inf, least
        while chosen is None or best - least > gap * abs(best):
            # An option that costs more than the best choice so far cannot be in a better one.
            possible = [place for place in by_cost if extra[place] <= (best - least) * (1 + 1e-6)]
            num_kept = len(self.num_options) + num_beside
            is_whole = num_kept >= len(possible)
            kept = {*possible[:num_kept], *(chosen or ())}
            try:
                found = solver.integer(kept, least, gap if is_whole else max(gap / 2, _CORE_GAP))
            except BudgetError:  # out of time
                if chosen is None:
                    raise
                break
            if found is not None:
                cost = math.fsum(objective[place] for place in found.chosen)
                chosen, best = (found.chosen, cost) if cost < best else (chosen, best)
            if is_whole:
                bound = least if found is None else found.bound
                break
            num_beside *= 2
        if chosen is None:
            return None
        places = sorted(chosen)  # one for each group, in the order of the groups
        options = {group: place - self.first[group] for group, place in zip(self.num_options, places, strict=True)}
        return {item: options[group] for item, group in self.groups.items()}, bound


def _merged(costs: Costs, ties: Iterable[Iterable[str]]) -> dict[str, str]:
    """The first item of each item's group of tied ones."""
    first = {item: item for item in costs}

    def root(item: str) -> str:
        while first[item] != item:
            item = first[item]
        return item

    order = {item: place for place, item in enumerate(costs)}
    for tie in ties:
        roots = sorted({root(item) for item in tie}, key=order.__getitem__)
        first |= dict.fromkeys(roots[1:], roots[0]) if roots else {}
    return {item: root(item) for item in costs}


def _check(costs: Costs, budgets: Sequence[Budget], groups: Mapping[str, str]) -> None:
    """Raise for costs and limits that are not usable numbers, or do not fit the options."""
    for item, row in costs.items():
        assert len(row) == len(costs[groups[item]]), f"{item} is tied to {groups[item]}, which has other options"
        if any(math.isnan(cost) or cost == -math.inf for cost in row) or all(map(math.isinf, row)):
            raise ConfigError(
                f"costs of {item!r}: {list(row)}; allowed: one number per option, no NaN, not infinity for all options"
            )
    for budget in budgets:
        tables: list[tuple[tuple[str, ...], Sequence[Sequence[float]], int]]
        tables = [((item,), [row], 1) for item, row in budget.costs.items()]
        tables += [(pair, table, len(costs[pair[0]])) for pair, table in budget.pair_costs.items()]
        for items, table, num_rows in tables:
            num_options, numbers = len(costs[items[-1]]), [number for row in table for number in row]
            fits = len(table) == num_rows and all(len(row) == num_options for row in table)
            if not fits or math.isnan(budget.limit) or any(not 0 <= number < math.inf for number in numbers):
                raise ConfigError(
                    f"budget {budget.name!r}: limit {budget.limit}, {items[0]!r} has {table}; allowed: a limit, and "
                    f"one number of at least 0 per option ({num_options})"
                )


def _why_not(program: _Program, budgets: Sequence[Budget], time_limit: float) -> str:
    """The least that can be reached of each budget: alone, and, if that suffices, with the others kept."""
    places = range(len(budgets))
    alone = [program.least(place, (), time_limit) for place in places]
    if any(least is None for least in alone) or not budgets:
        return "some tied items have no option that all of them may take; allow more options, or fewer ties"
    reasons = [
        f"{budget.name}: {budget.limit:.6g} allowed, {least:.6g} is the least that the options reach"
        for budget, least in zip(budgets, alone, strict=True)
        if least is not None and least > budget.limit
    ]
    if not reasons:
        for place, budget in enumerate(budgets):
            least = program.least(place, [other for other in places if other != place], time_limit)
            if least is not None:
                others = ", ".join(other.name for other in budgets if other is not budget)
                reasons.append(
                    f"{budget.name}: {budget.limit:.6g} allowed, {least:.6g} is the least within the limits of {others}"
                )
    return f"the budgets cannot be kept: {'; '.join(reasons) or 'each can alone, but no two together'}; allow more"
