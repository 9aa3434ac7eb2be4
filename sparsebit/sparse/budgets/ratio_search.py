"""Ratios per group under a budget: how much of each group is removed, by the integer program that also chooses bits.

Each group of channels is an item, each ratio an option. The cost of an option is the change of the model's output when
this group alone is pruned to that ratio, measured on data. The MACs and bytes of a layer are a product of the widths of
the two groups on its weight's axes, so they are pairs in the program. So is its time, as measured in ONNX Runtime at
several widths (`latency_table.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import BudgetError, CalibrationError, ConfigError
from sparsebit.execution.batches import Call
from sparsebit.execution.sample_rows import find_sample_rows
from sparsebit.graph.values.copying import copy_model
from sparsebit.graph.values.nested import tensors_of
from sparsebit.progress import track
from sparsebit.sparse.budgets.latency_table import POINTS, Clock, LatencyShare, MakePlan
from sparsebit.sparse.budgets.layer_budgets import LATENCY, LayerWeight, choose_options, tightened, timed_weights
from sparsebit.sparse.budgets.model_size import ModelSize, model_size
from sparsebit.sparse.channels.groups import Group, Unit, layers_of
from sparsebit.sparse.proof.bench import mask_units
from sparsebit.sparse.scoring.padding import real_positions, real_rows
from sparsebit.sparse.selecting.unit_selection import rounded, select
from sparsebit.sparse.shrinking.surgery import apply_plan
from sparsebit.sparse.sparse_config import SparseConfig

log = logging.getLogger(__name__)

BUDGETS = ("macs", "bytes", LATENCY)
CANDIDATES = (0.0, 0.0625, 0.125, 0.1875, 0.25, 0.375, 0.5, 0.625, 0.75)
KERNEL_WIDTHS = (16, 8, 1)  # float kernels work in blocks of 16 channels (8 without AVX-512)
COST_SAMPLES = 32  # a cost is an error relative to the output; more samples change it little, and take their time
LEAST_USED = 0.75  # of a budget: with coarse widths a net of few channels may lose far more than is asked
_MOST_TRIES, _MOST_PROGRAMS = 5, 12  # limits on smaller models that are timed, and on solved programs


@dataclass(frozen=True)
class RatioChoice:
    """The ratio of each group, by the first of its axes, and the size of the model before and after.

    `costs`: for each group the relative squared error of the model's output at the chosen ratio, when it is pruned
    alone. `latency`: the measurements, if it was a budget. `round_to`: widths stay multiples of this where they
    were.
    """

    ratios: Mapping[str, float]
    costs: Mapping[str, float]
    before: ModelSize
    after: ModelSize
    latency: LatencyShare | None = None
    round_to: int = 1

    @property
    def is_in_time(self) -> bool:
        """Whether a latency budget was kept, within the accuracy of the measurement."""
        return self.latency is None or self.latency.is_near or self.latency.ratio <= self.latency.asked

    def used(self, budgets: Mapping[str, float]) -> float:
        """How much of the tightest budget the smaller model takes: 1 is all of it."""
        shares = [
            getattr(self.after, name) / (limit if limit > 1 else limit * getattr(self.before, name))
            for name, limit in budgets.items()
            if name != LATENCY
        ]
        if self.latency is not None:
            shares.append(self.latency.ratio / self.latency.asked)
        return float(max(shares))

    def __str__(self) -> str:
        lines = [] if self.latency is None else [str(self.latency)]
        after = self.after.to_dict()
        for name, before in self.before.to_dict().items():
            lines.append(f"{name}: {before:,.0f} -> {after[name]:,.0f} ({after[name] / max(1, before):.3f})")
        return "\n".join([*lines, *(f"  {ratio:6.3f}  {name}" for name, ratio in self.ratios.items())])


def group_name(group: Group) -> str:
    """The first axis of the group, of a weight where it has one: `layer1.0.conv1.weight`."""
    made = [tensor for tensor, dim in group.axes if dim == 0 and tensor.endswith("weight")]
    return next(iter(made), group.axes[0][0])


def candidate_ratios(group: Group, config: SparseConfig, candidates: Sequence[float]) -> list[float]:
    """The ratios that a group may get: the candidates and none, or the one that the config names for its layers."""
    names = layers_of(group)
    return [config.ratio_of(names)] if config.is_overridden(names) else sorted({0.0, *candidates})


def check_budgets(
    budgets: Mapping[str, float], allowed: Sequence[str] = BUDGETS, shares: Sequence[str] = (LATENCY,)
) -> None:
    """Raise for names that are not allowed, and for limits that are not above 0, and up to 1 where they are shares."""
    wrong = [f"budget {name!r}" for name in budgets if name not in allowed]
    if wrong or not budgets:
        raise ConfigError(f"{wrong[0] if wrong else 'no budget was given'}: allowed: {', '.join(allowed)}")
    for name, limit in budgets.items():
        is_share = name in shares
        if not limit > 0 or (is_share and limit > 1):
            of = f"a share of the dense model's {'time' if name == LATENCY else name}, above 0 and up to 1"
            number = "a number above 0; up to 1 it is a share of the dense model"
            raise ConfigError(f"budget {name}={limit:g}: {of if is_share else number}")


@dataclass(frozen=True)
class RatioOptions:
    """The options of a choice: for each group its ratios, their `measured_costs`, the scores of its units; all weights.

    `sizes`: the shapes of all tensors; their widths stay multiples of `round_to`.
    """

    groups: Mapping[str, Group]
    ratios: Mapping[str, Sequence[float]]
    costs: Mapping[str, Sequence[float]]
    scores: Mapping[str, Tensor]
    weights: Sequence[LayerWeight]
    sizes: Mapping[str, tuple[int, ...]]
    round_to: int = 1

    def dead(self, name: str, ratio: float) -> list[Unit]:
        """The units of a group that a ratio removes."""
        units = select(self.groups[name], self.scores[name], ratio)
        return rounded([self.groups[name]], units, self.sizes, self.round_to)

    @cached_property
    def removed(self) -> dict[str, list[list[Unit]]]:
        """The units of each group at each of its ratios."""
        return {name: [self.dead(name, ratio) for ratio in ratios] for name, ratios in self.ratios.items()}


def search_ratios(
    model: nn.Module,
    options: RatioOptions,
    budgets: Mapping[str, float],
    *,
    plan: MakePlan,
    example: Any,
    clock: Callable[[], Clock] | None = None,
) -> RatioChoice:
    """The ratio of each group for which the smaller model keeps the budgets with the least loss.

    `plan`: removes units. MACs and bytes are counted on the smaller model itself, and its time is measured by
    `clock`.
    """
    before = model_size(model, example)
    search = _Search(model, options, plan, example, before)
    counted = {name: limit for name, limit in budgets.items() if name != LATENCY}
    limits = {name: limit if limit <= 1 else limit / getattr(before, name) for name, limit in counted.items()}
    if LATENCY not in budgets:
        found, latency = search.within(limits), None
    else:
        assert clock is not None
        running = clock()
        points = {
            point: {name: options.dead(name, point if len(own) > 1 else own[0]) for name, own in options.ratios.items()}
            for point in POINTS
        }
        search.options = replace(options, weights=timed_weights(options.weights, points, running))
        found, latency = search.in_time(limits, budgets[LATENCY], running)
    chosen = {name: own[found.options[name]] for name, own in options.ratios.items()}
    costs = {name: options.costs[name][place] for name, place in found.options.items()}
    return RatioChoice(chosen, costs, before, found.after, latency, options.round_to)


@dataclass(frozen=True)
class _Found:
    """The option of each group, and the smaller model. `predicted`: its time by the sum of measured regions."""

    options: Mapping[str, int]
    small: nn.Module
    after: ModelSize
    predicted: float


@dataclass
class _Search:
    model: nn.Module
    options: RatioOptions
    plan: MakePlan
    example: Any
    before: ModelSize

    def within(self, wanted: Mapping[str, float], time: float | None = None) -> _Found:
        """The best choice whose smaller model keeps the shares when it is counted; `time`: by the table."""
        costs, removed, weights = self.options.costs, self.options.removed, self.options.weights
        counts = {name: [len(units) for units in own] for name, own in removed.items()}
        timed = {} if time is None else {LATENCY: time}
        limits = dict(wanted)
        while True:
            chosen = choose_options(costs, counts, weights, {**limits, **timed}).options
            small = copy_model(self.model)
            apply_plan(small, self.plan([unit for name, own in removed.items() for unit in own[chosen[name]]]))
            after = model_size(small, self.example)
            over = {name: getattr(after, name) / getattr(self.before, name) / share for name, share in wanted.items()}
            if max(over.values(), default=0.0) <= 1:
                break
            # The program counts layers alone; the rest of the model is counted only in the smaller model itself.
            limits = tightened(limits, over)
        kept = {name: own[chosen[name]] for name, own in counts.items()}
        dense = sum(weight.amount(LATENCY, 1.0) for weight in weights) or 1.0
        predicted = sum(weight.amount(LATENCY, weight.share(kept)) for weight in weights) / dense
        return _Found(chosen, small, after, predicted)

    def in_time(self, wanted: Mapping[str, float], asked: float, clock: Clock) -> tuple[_Found, LatencyShare]:
        """The choice whose smaller model was measured nearest to the time; each try corrects the next target."""
        tried: list[tuple[_Found, LatencyShare]] = []
        aim = asked
        for _ in range(_MOST_PROGRAMS):
            try:
                found = self.within(wanted, min(1.0, aim))
            except BudgetError:
                if not tried:
                    raise
                break  # no option is as fast as the corrected target
            known = next((latency for other, latency in tried if other.options == found.options), None)
            if known is not None:  # it was timed already: continue in the same direction
                aim *= 0.98 if known.ratio > asked else 1.02
                continue
            ratio = clock.times(found.small)[1].ratio
            tried.append((found, LatencyShare(asked, ratio, found.predicted, len(tried) + 1)))
            if tried[-1][1].is_near or len(tried) == _MOST_TRIES:
                break
            # The table is wrong by about the same factor for the next model, so the target is corrected by that factor.
            aim *= asked / tried[-1][1].ratio
        best, latency = min(tried, key=lambda pair: abs(pair[1].ratio / asked - 1))
        latency = replace(latency, tries=len(tried))
        if not latency.is_near:
            away, side = abs(latency.ratio / asked - 1), "slower" if latency.ratio > asked else "faster"
            reason = f"{away:.0%} {side} than asked; the nearest of {len(tried)} that were timed"
            latency = replace(latency, reason=reason)
            log.warning("budget latency=%g: the smaller model is %s", asked, reason)
        return best, latency


@torch.no_grad()
def measured_costs(
    model: nn.Module,
    groups: Mapping[str, Group],
    scores: Mapping[str, Tensor],
    candidates: Mapping[str, Sequence[float]],
    batches: Sequence[Call],
) -> dict[str, list[float]]:
    """For each group and ratio: the relative squared error of the model's output when it is pruned alone.

    It is measured on the first `COST_SAMPLES` samples.
    """
    if not batches:
        raise CalibrationError("choose_ratios: no batch was given; give a few batches of inputs")
    trial = copy_model(model).eval()
    batches = list(_first_samples(batches, trial))
    dense = [_outputs(trial, call) for call in batches]
    energy = sum(float(x.square().sum()) for outputs in dense for x in outputs) or 1.0
    tensors = dict(trial.named_parameters())
    found: dict[str, list[float]] = {}
    for name, group in track(list(groups.items()), "measuring the cost of pruning each group", fewest=5):
        before = {tensor: tensors[tensor].clone() for tensor, _ in group.axes if tensor in tensors}
        found[name] = []
        num_gone = 0
        for ratio in candidates[name]:  # from less to more: what is pruned stays pruned
            units = select(group, scores[name], ratio)
            if len(units) == num_gone:  # nothing more goes (a small group, or a ratio of 0): no run is needed
                found[name].append(found[name][-1] if found[name] else 0.0)
                continue
            num_gone = len(units)
            mask_units(trial, units)
            pairs = (
                zip(_outputs(trial, call), outputs, strict=True) for call, outputs in zip(batches, dense, strict=True)
            )
            found[name].append(sum(float((x - y).square().sum()) for pair in pairs for x, y in pair) / energy)
        for tensor, value in before.items():
            tensors[tensor].copy_(value)
    return found


def _first_samples(batches: Iterable[Call], model: nn.Module) -> Iterator[Call]:
    left = COST_SAMPLES
    for call in batches:
        rows = find_sample_rows(call, model)
        yield rows.of(call, range(min(left, rows.count)))
        left -= rows.count
        if left <= 0:
            return


def _outputs(model: nn.Module, call: Call) -> list[Tensor]:
    """The model's outputs for the call, without padded positions."""
    real = real_positions(call, model)
    return [real_rows(x.double(), real) for x in tensors_of(model(*call[0], **call[1])) if x.is_floating_point()]
