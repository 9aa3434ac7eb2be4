"""How much of a budget each layer uses at each width of its groups, and the integer program that chooses the widths.

The MACs, the bytes and the time of a layer depend on the remaining share of its weight, which is the product of the
remaining shares of the two groups on its axes. So layers are pairs in the program.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.execution.batches import Call, num_samples
from sparsebit.graph.values.copying import copy_model
from sparsebit.numerics.choices.integer_program import Budget, Solution, choose
from sparsebit.sparse.budgets.latency_table import Clock, Curve, at_share
from sparsebit.sparse.channels.groups import Group, Unit, positions_of

LATENCY = "latency"


@dataclass(frozen=True)
class LayerWeight:
    """The full cost of one parameter, and the groups on its first two axes: (group, share per unit).

    `outputs`: how many numbers its layer computes in one call; `output_group`: the group of these channels. `times`:
    of its layer, by the remaining share of the parameter.
    """

    name: str
    macs: float
    bytes: float
    axes: tuple[tuple[str, float], ...]
    outputs: float = 0.0
    output_group: str = ""
    times: Curve = ()

    def amount(self, budget: str, share: float) -> float:
        """How much of a budget it uses when this share of the parameter remains."""
        if budget == LATENCY:
            return at_share(self.times, share)
        size: float = getattr(self, budget)
        return size * share

    def share(self, counts: Mapping[str, int]) -> float:
        """The remaining share when this many units of each group are removed."""
        return math.prod((1 - each * counts[group] for group, each in self.axes), start=1.0)


def weights_of(model: nn.Module, groups: Mapping[str, Group], call: Call) -> list[LayerWeight]:
    """The cost of every parameter, with the groups of its axes."""
    positions = _positions(model, call)
    parameters = dict(model.named_parameters())
    shares: dict[tuple[str, int], tuple[str, float]] = {}
    for name, group in groups.items():
        for (tensor, dim), places in positions_of(group.units).items():
            if tensor in parameters:
                shares[tensor, dim] = (name, len(places) / parameters[tensor].shape[dim] / len(group.units))
    found = []
    for name, parameter in parameters.items():
        axes = tuple(shares[name, dim] for dim in range(2) if (name, dim) in shares)
        size, times = parameter.numel(), positions.get(name, 0.0)
        output_group = shares[name, 0][0] if times and (name, 0) in shares else ""
        outputs = times * parameter.shape[0] if times else 0.0
        found.append(LayerWeight(name, size * times, float(parameter.nbytes), axes, outputs, output_group))
    return found


def _positions(model: nn.Module, call: Call) -> dict[str, float]:
    """How many times one sample of the call uses each weight of a convolution or linear layer in a multiplication."""
    found: Counter[str] = Counter()
    watched = copy_model(model, share_parameters=True)
    for path, module in watched.named_modules():
        if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):

            def note(layer: Any, args: tuple[Tensor, ...], output: Tensor, path: str = path) -> None:
                seen = args[0] if getattr(layer, "transposed", False) else output
                channels = seen.shape[-1] if isinstance(layer, nn.Linear) else seen.shape[1]
                found[f"{path}.weight".removeprefix(".")] += seen.numel() // max(1, channels)

            module.register_forward_hook(note)
    with torch.no_grad():
        count = max(1, num_samples(call, watched(*call[0], **call[1])))
    return {name: times / count for name, times in found.items()}


def tables(
    weights: Iterable[LayerWeight],
    num_options: Mapping[str, int],
    items_of: Callable[[LayerWeight], Iterable[str]],
    amount: Callable[[LayerWeight, Mapping[str, int]], float],
) -> tuple[dict[str, list[float]], dict[tuple[str, str], list[list[float]]], float]:
    """How much weights use of a budget: by the option of one item, by those of a pair of items, and without any item.

    `items_of`: at most two items for each weight. `amount(weight, places)`: with these options of its items.
    """
    single: dict[str, list[float]] = {}
    pairs: dict[tuple[str, str], list[list[float]]] = {}
    fixed = 0.0
    for weight in weights:
        items = tuple(dict.fromkeys(items_of(weight)))
        if not items:
            fixed += amount(weight, {})
        elif len(items) == 1:
            row = single.setdefault(items[0], [0.0] * num_options[items[0]])
            for place in range(len(row)):
                row[place] += amount(weight, {items[0]: place})
        else:
            one, other = items[::-1] if items[::-1] in pairs else items
            table = pairs.setdefault((one, other), [[0.0] * num_options[other] for _ in range(num_options[one])])
            for i, line in enumerate(table):
                for j in range(len(line)):
                    line[j] += amount(weight, {one: i, other: j})
    return single, pairs, fixed


def tightened(limits: Mapping[str, float], over: Mapping[str, float]) -> dict[str, float]:
    """Lower limits for the next solution, by how much the last one exceeded them (`over`: 1 is just within).

    An exceeded limit falls by at least 0.2 %, so a loop ends with a choice or, once no option fits, a BudgetError.
    """
    return {name: limit * min(1.0, 0.998 / over[name]) for name, limit in limits.items()}


def choose_options(
    costs: Mapping[str, Sequence[float]],
    counts: Mapping[str, Sequence[int]],
    weights: Iterable[LayerWeight],
    limits: Mapping[str, float],
) -> Solution:
    """The options with the least cost whose weights stay within the limits: shares of what the dense model takes.

    `counts`: how many units of a group each option removes.
    """
    listed = list(weights)
    num_options = {group: len(own) for group, own in counts.items()}
    budgets = []
    for name, limit in limits.items():

        def amount(weight: LayerWeight, places: Mapping[str, int], name: str = name) -> float:
            return weight.amount(name, weight.share({group: counts[group][place] for group, place in places.items()}))

        single, pairs, fixed = tables(listed, num_options, lambda weight: (group for group, _ in weight.axes), amount)
        if costs:  # fixed costs are added to each option of one group, so that errors show the full numbers
            item = next(iter(costs))
            single[item] = [used + fixed for used in single.get(item, [0.0] * len(costs[item]))]
        title = f"{name} (ms)" if name == LATENCY else name
        budgets.append(Budget(title, limit * sum(weight.amount(name, 1.0) for weight in listed), single, pairs))
    return choose(costs, budgets, gap=1e-3)


def timed_weights(
    weights: Sequence[LayerWeight], points: Mapping[float, Mapping[str, list[Unit]]], clock: Clock
) -> list[LayerWeight]:
    """The weights with the measured times of their layers; and for each group, its part of the remaining time.

    `points`: the units removed from each group at each ratio.
    """
    units, shares = {}, {0.0: {weight.name: 1.0 for weight in weights}}
    for ratio, removed in points.items():
        counts = {name: len(own) for name, own in removed.items()}
        units[ratio] = [unit for own in removed.values() for unit in own]
        shares[ratio] = {weight.name: weight.share(counts) for weight in weights}
    curves, rest = clock.curves(units, shares)
    outputs: defaultdict[str, float] = defaultdict(float)
    for weight in weights:
        if weight.output_group:
            outputs[weight.output_group] += weight.outputs
    total = sum(outputs.values())
    others = []
    for group, count in outputs.items():
        each = next(each for weight in weights for name, each in weight.axes if name == group)
        times = tuple((left, ms * count / total) for left, ms in rest) if total else ()
        others.append(LayerWeight(f"(outside of layers, {group})", 0.0, 0.0, ((group, each),), times=times))
    return [*(replace(weight, times=curves.get(weight.name, ())) for weight in weights), *others]
