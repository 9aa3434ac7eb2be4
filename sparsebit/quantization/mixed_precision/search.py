"""`search_bits`: chooses the number of bits of every site with the least loss within the budgets."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from sparsebit.config.schema import QuantConfig
from sparsebit.config.selectors import near_names
from sparsebit.errors import CalibrationError, ConfigError, users_level
from sparsebit.execution.batches import as_call, require_repeatable, to_device
from sparsebit.numerics.choices.integer_program import Budget, choose
from sparsebit.quantization.mixed_precision.bit_config import with_bits
from sparsebit.quantization.mixed_precision.sensitivity import WEIGHT_BITS, Loss, Method, Sensitivity, require_sites
from sparsebit.quantization.mixed_precision.sensitivity import sensitivity as measure
from sparsebit.quantization.mixed_precision.site_facts import SearchedSites, facts_of
from sparsebit.quantization.model.quant_model import QuantModel

BUDGETS = ("bytes", "weight_bits", "activation_bits", "bops")
_FLOAT_BITS = 32
# Scores are estimates: a choice that is proven to be this near to the best is as good as the best.
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
        rows = [("site", "bits", "score")]
        rows += [
            (site, str(count), f"{scores[site][count]:.3g}")
            for site, count in self.bits.items()
            if len(scores.get(site, ())) > 1
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = [f"{a.ljust(widths[0])}  {b.rjust(widths[1])}  {c.rjust(widths[2])}" for a, b, c in rows]
        budgets = [f"{name}: {_shown(self.spent[name])} of {_shown(limit)}" for name, limit in self.limits.items()]
        fixed = [scores[site][count] for site, count in self.bits.items() if len(scores.get(site, ())) == 1]
        rest = f", of which {sum(fixed):.4g} at {len(fixed)} sites that had no choice" if fixed else ""
        return "\n".join([*table, *budgets, f"sum of scores: {self.loss:.4g}{rest}"])


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
    ties: Sequence[Sequence[str]] = (),
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
    options = _Options(weight_bits, activation_bits, method, loss, sensitivity, ties, time_limit)
    (found,) = _searched(qmodel, data, [budgets], options)
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
    ties: Sequence[Sequence[str]] = (),
    time_limit: float = 60.0,
) -> list[BitSearch]:
    """The best choice for each limit of one budget, from one measurement of the sensitivity."""
    options = _Options(weight_bits, activation_bits, method, loss, sensitivity, ties, time_limit)
    return _searched(qmodel, data, [{budget: limit} for limit in limits], options)


@dataclass(frozen=True)
class _Options:
    """Those of `search_bits`."""

    weight_bits: Sequence[int]
    activation_bits: Sequence[int]
    method: Method
    loss: Loss | None
    sensitivity: Sensitivity | None
    ties: Sequence[Sequence[str]]
    time_limit: float

    def scores(self, qmodel: QuantModel, data: Any) -> Sensitivity:
        if self.sensitivity is not None:
            return self.sensitivity
        return measure(
            *(qmodel, data),
            method=self.method,
            weight_bits=self.weight_bits,
            activation_bits=self.activation_bits,
            loss=self.loss,
        )


def _searched(qmodel: QuantModel, data: Any, wishes: Sequence[Budgets], options: _Options) -> list[BitSearch]:
    if isinstance(data, (Tensor, Mapping)):
        data = [data]
    require_repeatable(data, "search_bits()")
    if qmodel.applied_algorithms:
        raise CalibrationError(
            f"search_bits(): {', '.join(qmodel.applied_algorithms)} has changed the weights for the bits that the "
            "model has; calibrate it without ALGORITHMS, search, and give them with the config that is found"
        )
    first = next(iter(data), None)
    if first is None:
        raise CalibrationError("search_bits() was given no data; give the calibration batches, in a list")
    call = as_call(first, qmodel.original)
    call = to_device(call[0], qmodel.device), to_device(call[1], qmodel.device)
    facts = facts_of(qmodel.model, qmodel.plan, qmodel, call)
    for wish in wishes:
        _check_names(wish)
    scores = options.scores(qmodel, data)
    require_sites(scores.scores, qmodel.plan)
    _tell_without_scores(scores)
    tied = [*_ties(facts, qmodel.config.BACKEND), *_given_ties(options.ties, scores, facts)]
    program = _Program(facts, scores, tied, _other_bytes(qmodel, facts), options.time_limit)
    return [_chosen(qmodel, first, wish, program) for wish in wishes]


def _tell_without_scores(scores: Sensitivity) -> None:
    """Warn if no choice costs anything: the program then takes any bits, possibly the fewest."""
    rows = [row for row in scores.scores.values() if len(row) > 1]
    if rows and not any(score for row in rows for score in row.values()):
        warnings.warn(
            "search_bits(): no tensor changes the outputs on this data, so all bits look equally good and the choice "
            "is arbitrary; give data on which the outputs differ",
            stacklevel=users_level(),
        )


@dataclass(frozen=True)
class _Program:
    """The parts that the integer programs of all wishes share."""

    facts: SearchedSites
    scores: Sensitivity
    ties: Sequence[Sequence[str]]
    other_bytes: int
    time_limit: float


def _chosen(qmodel: QuantModel, example: Any, wish: Budgets, program: _Program) -> BitSearch:
    facts, scores = program.facts, program.scores
    own = {site: qmodel.plan[site].spec.bits for site in scores.scores}
    options = {
        kind: sorted(
            {bits for site, row in scores.scores.items() if facts.sites[site].is_weight is kind for bits in row}
        )
        for kind in (True, False)
    }
    lists = {site: options[facts.sites[site].is_weight] for site in scores.scores}
    costs = {site: [row.get(bits, float("inf")) for bits in lists[site]] for site, row in scores.scores.items()}
    given = (
        [_site_budget(name, limit, facts, own, lists, program.other_bytes) for name, limit in wish.items()]
        if isinstance(wish, Mapping)
        else list(wish)
    )
    budgets = [_program_budget(budget, lists) for budget in given]
    everything = {**costs, _REST: [0.0]}
    solved = choose(everything, budgets, ties=program.ties, gap=_GAP, time_limit=program.time_limit)
    bits = {site: lists[site][solved.options[site]] for site in costs}
    config = _config(qmodel, bits, facts)
    _verify(qmodel, config, bits, example)
    limits = {budget.name: budget.limit for budget in given}
    return BitSearch(config, bits, solved.cost, solved.spent, limits, solved.gap, scores)


# --- budgets


def _check_names(wish: Budgets) -> None:
    if not wish:
        raise ConfigError(f"no budget was given; give one or more of {', '.join(BUDGETS)}")
    if not isinstance(wish, Mapping):
        names = [budget.name for budget in wish]
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise ConfigError(f"two budgets are called {twice[0]!r}; give each a name of its own")
        return
    for name, limit in wish.items():
        if name not in BUDGETS:
            raise ConfigError(f"no budget is called {name!r}; allowed: {', '.join(BUDGETS)}, or a SiteBudget")
        if not limit > 0:
            raise ConfigError(f"budget {name}={limit}: allowed: numbers above 0")


def _site_budget(
    name: str,
    limit: float,
    facts: SearchedSites,
    own: Mapping[str, int],
    lists: Mapping[str, Sequence[int]],
    other_bytes: int,
) -> SiteBudget:
    """The budget of this name; a share is relative to the model's cost with its own bits."""
    if name == "bytes":
        made = SiteBudget(name, limit, _weight_costs(facts, lists), fixed=other_bytes)
    elif name == "bops":
        made = _bops(limit, facts, lists)
    else:
        wants_weights = name == "weight_bits"
        sizes = {site: facts.sites[site].num_elements for site in lists if facts.sites[site].is_weight is wants_weights}
        total = sum(sizes.values())
        if not total:
            raise ConfigError(
                f"budget {name}: the model has no quantized {'weight' if wants_weights else 'activation'}s"
            )
        costs = {site: {bits: bits * size / total for bits in lists[site]} for site, size in sizes.items()}
        return SiteBudget(name, limit, costs)
    if limit > 1:
        return made
    return replace(made, limit=limit * _program_budget(made, lists).spent({**_places(own, lists), _REST: 0}))


def _weight_costs(facts: SearchedSites, lists: Mapping[str, Sequence[int]]) -> dict[str, dict[int, float]]:
    """Bytes; a weight that several sites read counts once."""
    costs: dict[str, dict[int, float]] = {}
    counted: set[int] = set()
    for site, choices in lists.items():
        fact = facts.sites[site]
        if fact.is_weight and (fact.parameter is None or fact.parameter not in counted):
            counted.update(() if fact.parameter is None else (fact.parameter,))
            costs[site] = {bits: fact.num_bytes(bits) for bits in choices}
    return costs


def _bops(limit: float, facts: SearchedSites, lists: Mapping[str, Sequence[int]]) -> SiteBudget:
    costs: dict[str, dict[int, float]] = {}
    pairs: dict[tuple[str, str], dict[tuple[int, int], float]] = {}
    fixed = 0.0
    for product in facts.products:
        count = float(product.num_multiplications)
        weight, activation = ((site if site in lists else None) for site in (product.weight, product.activation))
        if weight is not None and activation is not None:
            table = pairs.setdefault((weight, activation), {})
            for a in lists[weight]:
                for b in lists[activation]:
                    table[a, b] = table.get((a, b), 0.0) + count * a * b
        elif weight is not None or activation is not None:
            site = str(weight or activation)
            row = costs.setdefault(site, dict.fromkeys(lists[site], 0.0))
            for bits in lists[site]:
                row[bits] += count * bits * _FLOAT_BITS
        else:
            fixed += count * _FLOAT_BITS**2
    return SiteBudget("bops", limit, costs, pairs, fixed)


def _program_budget(budget: SiteBudget, lists: Mapping[str, Sequence[int]]) -> Budget:
    if unknown := [site for site in budget.costs if site not in lists]:
        near = ", ".join(near_names(unknown[0], list(lists)))
        raise ConfigError(f"budget {budget.name!r} has a site {unknown[0]!r}, which has no scores; near names: {near}")
    for site, row in budget.costs.items():
        if lacking := [str(bits) for bits in lists[site] if bits not in row]:
            raise ConfigError(
                f"budget {budget.name!r}: {site} has no cost at {', '.join(lacking)} bits, which it may get; give "
                "costs of all candidate bits and of its own"
            )
    costs: dict[str, Sequence[float]] = {
        site: [float(row[bits]) for bits in lists[site]] for site, row in budget.costs.items()
    }
    pairs = {
        (a, b): [[float(table[i, j]) for j in lists[b]] for i in lists[a]]
        for (a, b), table in budget.pair_costs.items()
    }
    return Budget(budget.name, budget.limit, {**costs, _REST: [budget.fixed]}, pairs)


def _places(bits: Mapping[str, int], lists: Mapping[str, Sequence[int]]) -> dict[str, int]:
    return {site: lists[site].index(count) for site, count in bits.items()}


def _other_bytes(qmodel: QuantModel, facts: SearchedSites) -> int:
    """The bytes of all parameters without a site: biases, norms, float weights."""
    own = {site: qmodel.plan[site].spec.bits for site in facts.sites}
    packed = _weight_costs(facts, {site: [bits] for site, bits in own.items()})
    quantized = sum(row[own[site]] for site, row in packed.items())
    return max(0, sum(parameter.bytes for parameter in qmodel.coverage.parameters) - int(quantized))


# --- ties


def _ties(facts: SearchedSites, backend: str) -> list[tuple[str, ...]]:
    groups: dict[tuple[bool, object], list[str]] = {}
    for site, fact in facts.sites.items():
        for layer in fact.layers:
            groups.setdefault((fact.is_weight, layer), []).append(site)
        if fact.parameter is not None:
            groups.setdefault((True, fact.parameter), []).append(site)
    found = [tuple(group) for group in groups.values() if len(group) > 1]
    return [*found, *(() if backend == "virtual" else facts.siblings)]


def _given_ties(ties: Sequence[Sequence[str]], scores: Sensitivity, facts: SearchedSites) -> list[list[str]]:
    """The sites of each tie; weights and activations separately."""
    found: list[list[str]] = []
    for globs in ties:
        if isinstance(globs, str):
            raise ConfigError(f"ties={globs!r}: a tie is a list of globs on sites; write [[{globs!r}]]")
        sites = [site for site in scores.scores if any(fnmatchcase(site, glob) for glob in globs)]
        if not sites:
            near = ", ".join(near_names(globs[0], list(scores.scores))) if globs else "-"
            raise ConfigError(f"the tie {list(globs)} matches no site; near names: {near}")
        found += [[site for site in sites if facts.sites[site].is_weight is kind] for kind in (True, False)]
    return found


# --- the config


def _config(qmodel: QuantModel, bits: Mapping[str, int], facts: SearchedSites) -> QuantConfig:
    layers: dict[bool, dict[str, int]] = {True: {}, False: {}}
    for site, count in bits.items():
        fact = facts.sites[site]
        layers[fact.is_weight].update(dict.fromkeys(fact.layers, count))
    return with_bits(qmodel.config, qmodel.plan.layers, layers[True], layers[False])


def _verify(qmodel: QuantModel, config: QuantConfig, bits: Mapping[str, int], example: Any) -> None:
    """Build the model from the config alone, and compare the bits of all sites."""
    built = QuantModel(qmodel.original, config, example_inputs=example).plan
    wrong = [site for site, count in bits.items() if site not in built or built[site].spec.bits != count]
    assert not wrong, f"the config that was found gives other bits than were chosen at {', '.join(wrong[:5])}"
