"""`search_bits`: chooses the number of bits of every site with the least loss within the budgets.

The choice is an integer program (`numerics/choices`): one option per site and number of bits, costs are the scores of
`sensitivity`, limits are budgets in bytes, mean bits, BOPs or costs of the user's. Sites whose bits one entry of a
config sets are tied. The result is a config; a model is built from it as a check, because the config alone has to give
the chosen bits. The calibrated model does not change.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import Tensor

from sparsebit.config.schema import QuantConfig
from sparsebit.config.selectors import near_names
from sparsebit.errors import CalibrationError, ConfigError, users_level
from sparsebit.execution.batches import calls, require_repeatable
from sparsebit.numerics.choices.integer_program import Budget, choose
from sparsebit.quantization.mixed_precision.bit_config import with_bits
from sparsebit.quantization.mixed_precision.sensitivity import (
    WEIGHT_BITS,
    Loss,
    Method,
    Sensitivity,
    require_sites,
)
from sparsebit.quantization.mixed_precision.sensitivity import sensitivity as measure
from sparsebit.quantization.mixed_precision.site_facts import SearchedSites, facts_of
from sparsebit.quantization.model.quant_model import QuantModel
from sparsebit.text_table import text_table

BUDGETS = ("bytes", "weight_bits", "activation_bits", "bops")
_FLOAT_BITS = 32
# Scores are estimates, so a choice that is proven to be within this share of the best one is good enough.
_GAP = 1e-4
_REST = "(all else)"


@dataclass(frozen=True)
class SiteBudget:
    """A limit on the sum of `costs[site][bits]` over all sites, and of `pair_costs[(site, site)][(bits, bits)]`.

    The costs may be anything that adds up: bytes, operations, measured time.
    """

    name: str
    limit: float
    costs: Mapping[str, Mapping[int, float]]
    pair_costs: Mapping[tuple[str, str], Mapping[tuple[int, int], float]] = field(default_factory=dict)
    fixed: float = 0.0


Ties = Sequence[Sequence[str]]
Scores = Sensitivity | Callable[..., Sensitivity]
Lists = Mapping[str, Sequence[int]]  # the numbers of bits that each site may have
Budgets = Mapping[str, float] | Sequence[SiteBudget]


@dataclass(frozen=True)
class BitSearch:
    """The result of a search. `config` alone rebuilds the model: `sparsebit.quantize(model, batches, found.config)`.

    `bits`: of each site. `loss`: the sum of the sites' scores. `spent`, `limits`: of each budget. `gap`: a proven bound
    on how much smaller the loss of the best choice may be, relative to this one.
    """

    config: QuantConfig
    bits: Mapping[str, int]
    loss: float
    spent: Mapping[str, float]
    limits: Mapping[str, float]
    gap: float
    sensitivity: Sensitivity
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return {
            "bits": dict(self.bits),
            "loss": self.loss,
            "budgets": {name: {"spent": self.spent[name], "limit": limit} for name, limit in self.limits.items()},
            "gap": self.gap,
            "seconds": self.seconds,
            "config": self.config.to_dict(),
            "sensitivity": self.sensitivity.to_dict(),
        }

    def __str__(self) -> str:
        """A row per site with a choice, in the order of the model, and a line per budget."""
        scores = self.sensitivity.scores
        rows = [(site, str(count), f"{scores[site][count]:.3g}") for site, count in self.bits.items() if site in scores]
        shown = [("site", "bits", "score"), *(row for row in rows if len(scores[row[0]]) > 1)]
        table = text_table(shown, numbers=True)
        budgets = [f"{name}: {_shown(self.spent[name])} of {_shown(limit)}" for name, limit in self.limits.items()]
        fixed = [scores[site][count] for site, count in self.bits.items() if len(scores.get(site, ())) == 1]
        rest = f", of which {sum(fixed):.4g} at {len(fixed)} sites that had no choice" if fixed else ""
        return "\n".join([table, *budgets, f"sum of scores: {self.loss:.4g}{rest}"])


def _shown(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.6g}"


def search_bits(
    qmodel: QuantModel,
    data: Any,
    budgets: Budgets,
    *,
    weight_bits: Sequence[int] = WEIGHT_BITS,
    activation_bits: Sequence[int] = (),
    method: Method = "gradient",
    loss: Loss | None = None,
    sensitivity: Sensitivity | None = None,
    ties: Ties = (),
    time_limit: float = 60.0,
) -> BitSearch:
    """Choose the bits of every site of a calibrated model, by an exact integer program; returns a config, changes
    nothing.

    `budgets`: limits by name, one or several. "bytes" of all parameters; "weight_bits", "activation_bits": the mean
    over all elements; "bops": products of the bits of a layer's weight and input, times its multiplications. Bytes and
    BOPs up to 1 are shares of the current model's. Or `SiteBudget`s with your own costs.

    `weight_bits`, `activation_bits`: the candidates; without any, sites keep their bits. `ties`: groups of
    globs on sites; the weights of a group get the same bits, and so do its activations. Sites that one entry of a
    config sets (the inputs of an add or a concat, a tensor that several layers read) are tied, and on a runtime also
    the weights of linear layers that read the same tensor (q, k, v). `sensitivity`: scores of an earlier measurement,
    instead of `method`, `loss` and candidates.

    >>> found = search_bits(qmodel, batches, {"weight_bits": 4}, weight_bits=(2, 3, 4, 8))  # doctest: +SKIP
    >>> smaller = sparsebit.quantize(model, batches, found.config)  # doctest: +SKIP
    """
    start = time.monotonic()
    measured = partial(measure, method=method, loss=loss, weight_bits=weight_bits, activation_bits=activation_bits)
    found = _Search(qmodel, data, [budgets], sensitivity or measured, ties, time_limit).best(budgets)
    return replace(found, seconds=time.monotonic() - start)


def pareto_curve(
    qmodel: QuantModel,
    data: Any,
    budget: str,
    limits: Sequence[float],
    *,
    weight_bits: Sequence[int] = WEIGHT_BITS,
    activation_bits: Sequence[int] = (),
    method: Method = "gradient",
    loss: Loss | None = None,
    sensitivity: Sensitivity | None = None,
    ties: Ties = (),
    time_limit: float = 60.0,
) -> list[BitSearch]:
    """The best choice for each limit of one budget, from one measurement of the sensitivity."""
    measured = partial(measure, method=method, loss=loss, weight_bits=weight_bits, activation_bits=activation_bits)
    wishes = [{budget: limit} for limit in limits]
    search = _Search(qmodel, data, wishes, sensitivity or measured, ties, time_limit)
    return [search.best(wish) for wish in wishes]


class _Search:
    """Facts about sites, scores, candidate bits and ties, which the integer programs of all limits share."""

    def __init__(
        self, qmodel: QuantModel, data: Any, wishes: Sequence[Budgets], scores: Scores, ties: Ties, time_limit: float
    ) -> None:
        data = [data] if isinstance(data, (Tensor, Mapping)) else data
        require_repeatable(data, "search_bits()")
        if qmodel.applied_algorithms:
            raise CalibrationError(
                f"search_bits(): {', '.join(qmodel.applied_algorithms)} has changed the weights for the bits that the "
                "model has; calibrate it without ALGORITHMS, search, and give them with the config that is found"
            )
        self.qmodel, self.example, self.time_limit = qmodel, next(iter(data), None), time_limit
        if self.example is None:
            raise CalibrationError("search_bits() was given no data; give the calibration batches, in a list")
        (call,) = calls([self.example], qmodel.original, qmodel.device)
        self.facts = facts_of(qmodel.model, qmodel.plan, qmodel, call)
        for wish in wishes:
            _check_names(wish)
        self.sensitivity = scores if isinstance(scores, Sensitivity) else scores(qmodel, data)
        self.scores = self.sensitivity.scores
        require_sites(self.scores, qmodel.plan)
        rows = [row for row in self.scores.values() if len(row) > 1]
        if rows and not any(score for row in rows for score in row.values()):
            warnings.warn(
                "search_bits(): no tensor changes the outputs on this data, so all bits look equally good and the "
                "choice is arbitrary; give data on which the outputs differ",
                stacklevel=users_level(),
            )
        is_weight = {site: self.facts.sites[site].is_weight for site in self.scores}
        choices = {
            kind: sorted({bits for site, row in self.scores.items() if is_weight[site] is kind for bits in row})
            for kind in (True, False)
        }
        self.lists = {site: choices[is_weight[site]] for site in self.scores}  # the numbers of bits it may have
        self.ties = [*_ties(self.facts, qmodel.config.BACKEND), *self._given_ties(ties)]

    def best(self, wish: Budgets) -> BitSearch:
        lists, qmodel = self.lists, self.qmodel
        costs = {site: [row.get(bits, float("inf")) for bits in lists[site]] for site, row in self.scores.items()}
        named = [self._named(*item) for item in wish.items()] if isinstance(wish, Mapping) else list(wish)
        budgets = [self._budget(budget) for budget in named]
        everything = {**costs, _REST: [0.0]}
        solved = choose(everything, budgets, ties=self.ties, gap=_GAP, time_limit=self.time_limit)
        bits = {site: lists[site][solved.options[site]] for site in costs}
        layers: dict[bool, dict[str, int]] = {True: {}, False: {}}
        for site, count in bits.items():
            fact = self.facts.sites[site]
            layers[fact.is_weight].update(dict.fromkeys(fact.layers, count))
        config = with_bits(qmodel.config, qmodel.plan.layers, layers[True], layers[False])
        # The config alone must build the model with these bits.
        built = QuantModel(qmodel.original, config, example_inputs=self.example).plan
        wrong = [site for site, count in bits.items() if site not in built or built[site].spec.bits != count]
        assert not wrong, f"the config that was found gives other bits than were chosen at {', '.join(wrong[:5])}"
        limits = {budget.name: budget.limit for budget in named}
        return BitSearch(config, bits, solved.cost, solved.spent, limits, solved.gap, self.sensitivity)

    def _named(self, name: str, limit: float) -> SiteBudget:
        """The budget of this name; a share is relative to the model's cost with its own bits."""
        lists, facts = self.lists, self.facts
        if name in ("weight_bits", "activation_bits"):
            chosen = [site for site in lists if facts.sites[site].is_weight is (name == "weight_bits")]
            sizes = {site: facts.sites[site].num_elements for site in chosen}
            total = sum(sizes.values())
            if not total:
                raise ConfigError(f"budget {name}: the model has none of these quantized")
            costs = {site: {bits: bits * size / total for bits in lists[site]} for site, size in sizes.items()}
            return SiteBudget(name, limit, costs)
        if name == "bops":
            made = _bops(limit, facts, lists)
        else:
            made = SiteBudget(name, limit, _weight_costs(facts, lists), fixed=self._other_bytes())
        if limit > 1:
            return made
        own = {site: lists[site].index(self.qmodel.plan[site].spec.bits) for site in lists}
        return replace(made, limit=limit * self._budget(made).spent({**own, _REST: 0}))

    def _budget(self, budget: SiteBudget) -> Budget:
        lists = self.lists
        require_sites([*budget.costs, *itertools.chain(*budget.pair_costs)], lists, f"budget {budget.name!r}")
        for site, row in budget.costs.items():
            if lacking := [str(bits) for bits in lists[site] if bits not in row]:
                raise ConfigError(
                    f"budget {budget.name!r}: {site} has no cost at {', '.join(lacking)} bits, which it may get; give "
                    "costs of all candidate bits and of its own"
                )
        costs = {site: [float(row[bits]) for bits in lists[site]] for site, row in budget.costs.items()}
        pairs = {
            (a, b): [[float(table[i, j]) for j in lists[b]] for i in lists[a]]
            for (a, b), table in budget.pair_costs.items()
        }
        return Budget(budget.name, budget.limit, {**costs, _REST: [budget.fixed]}, pairs)

    def _other_bytes(self) -> int:
        """The bytes of all parameters without a site: biases, norms, float weights."""
        own = {site: [self.qmodel.plan[site].spec.bits] for site in self.facts.sites}
        quantized = sum(sum(row.values()) for row in _weight_costs(self.facts, own).values())
        return max(0, sum(parameter.bytes for parameter in self.qmodel.coverage.parameters) - int(quantized))

    def _given_ties(self, ties: Ties) -> list[list[str]]:
        """The sites of each tie; weights and activations separately."""
        found: list[list[str]] = []
        for globs in ties:
            sites = [site for site in self.scores if any(fnmatchcase(site, glob) for glob in globs)]
            if isinstance(globs, str) or not sites:
                near = ", ".join(near_names(globs[0], list(self.scores))) if globs else "-"
                raise ConfigError(f"the tie {globs!r}: allowed: a list of globs that match sites; near names: {near}")
            found += [[site for site in sites if self.facts.sites[site].is_weight is kind] for kind in (True, False)]
        return found


def _check_names(wish: Budgets) -> None:
    names = list(wish) if isinstance(wish, Mapping) else [budget.name for budget in wish]
    is_known = not isinstance(wish, Mapping) or all(name in BUDGETS and limit > 0 for name, limit in wish.items())
    if not names or not is_known or len(set(names)) < len(names):
        raise ConfigError(
            f"budgets {wish}: allowed: one or more of {', '.join(BUDGETS)} with limits above 0, or SiteBudgets with "
            "different names"
        )


def _weight_costs(facts: SearchedSites, lists: Lists) -> dict[str, dict[int, float]]:
    """The bytes of each weight site by bits; a weight that several sites read counts once."""
    costs: dict[str, dict[int, float]] = {}
    counted: set[int | None] = set()
    for site, choices in lists.items():
        fact = facts.sites[site]
        if fact.is_weight and (fact.parameter is None or fact.parameter not in counted):
            counted.add(fact.parameter)
            costs[site] = {bits: fact.num_bytes(bits) for bits in choices}
    return costs


def _bops(limit: float, facts: SearchedSites, lists: Lists) -> SiteBudget:
    """Bit operations: bits of the weight times bits of the input times multiplications; float operands have 32."""
    costs: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    pairs: dict[tuple[str, str], dict[tuple[int, int], float]] = defaultdict(lambda: defaultdict(float))
    fixed = 0.0
    for product in facts.products:
        count = float(product.num_multiplications)
        sites = [site for site in (product.weight, product.activation) if site in lists and site is not None]
        if len(sites) == 2:
            weight, activation = sites
            for a, b in itertools.product(lists[weight], lists[activation]):
                pairs[weight, activation][a, b] += count * a * b
        elif sites:
            for bits in lists[sites[0]]:
                costs[sites[0]][bits] += count * bits * _FLOAT_BITS
        else:
            fixed += count * _FLOAT_BITS**2
    return SiteBudget("bops", limit, costs, pairs, fixed)


def _ties(facts: SearchedSites, backend: str) -> list[tuple[str, ...]]:
    """Sites that must have the same bits: those of one config entry, those that read one weight, and siblings."""
    groups: dict[tuple[bool, object], list[str]] = defaultdict(list)
    for site, fact in facts.sites.items():
        for layer in fact.layers:
            groups[fact.is_weight, layer].append(site)
        if fact.parameter is not None:
            groups[True, fact.parameter].append(site)
    found = [tuple(group) for group in groups.values() if len(group) > 1]
    return [*found, *(() if backend == "virtual" else facts.siblings)]
