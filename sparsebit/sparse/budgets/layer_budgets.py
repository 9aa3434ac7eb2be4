"""How much of a budget each layer uses at each width of its groups, and the integer program that chooses the widths.

The MACs, the bytes and the time of a layer depend on the remaining share of its weight, which is the product of the
remaining shares of the two groups on its axes. So layers are pairs in the program.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.execution.batches import Call, num_samples
from sparsebit.numerics.choices.integer_program import Budget, Solution, choose
from sparsebit.sparse.budgets.latency_table import Clock, Curve, at_share
from sparsebit.sparse.channels.groups import Group, Unit

LATENCY = "latency"


@dataclass(frozen=True)
class LayerWeight:
    """The full cost of one parameter, and the groups on its first two axes: (group, share per unit).

    `outputs`: how many numbers its layer computes in one call; `made`: the group of these channels. `times`: of its
    layer, by the remaining share of the parameter.
    """

    name: str
    macs: float
    bytes: float
    axes: tuple[tuple[str, float], ...]
    outputs: float = 0.0
    made: str = ""
    times: Curve = ()

    def amount(self, budget: str, share: float) -> float:
        """How much of a budget it uses when this share of the parameter remains."""
        if budget == LATENCY:
            return at_share(self.times, share)
        size: float = getattr(self, budget)
        return size * share

    def share(self, counts: Mapping[str, int]) -> float:
        """The remaining share when this many units of each group are removed."""
        left = 1.0
        for group, each in self.axes:
            left *= 1 - each * counts[group]
        return left


def weights_of(model: nn.Module, groups: Mapping[str, Group], call: Call) -> list[LayerWeight]:
    """The cost of every parameter, with the groups of its axes."""
    positions = _positions(model, call)
    sizes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    shares: dict[tuple[str, int], tuple[str, float]] = {}
    for name, group in groups.items():
        for tensor, dim in group.axes:
            places = sum(len(p) for unit in group.units for t, d, p in unit.members if (t, d) == (tensor, dim))
            if tensor in sizes:
                shares[tensor, dim] = (name, places / sizes[tensor][dim] / len(group.units))
    found = []
    for name, parameter in model.named_parameters():
        axes = tuple(shares[name, dim] for dim in range(2) if (name, dim) in shares)
        size, times = parameter.numel(), positions.get(name, 0.0)
        made = shares[name, 0][0] if times and (name, 0) in shares else ""
        outputs = times * parameter.shape[0] if times else 0.0
        found.append(LayerWeight(name, size * times, float(size * parameter.element_size()), axes, outputs, made))
    return found


def _positions(model: nn.Module, call: Call) -> dict[str, float]:
    """How many times one sample of the call uses each weight of a convolution or linear layer in a multiplication."""
    found: dict[str, float] = {}
    handles = []
    for path, module in model.named_modules():
        if not isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
            continue

        def note(layer: Any, args: tuple[Tensor, ...], output: Tensor, path: str = path) -> None:
            seen = args[0] if getattr(layer, "transposed", False) else output
            channels = seen.shape[-1] if isinstance(layer, nn.Linear) else seen.shape[1]
            name = f"{path}.weight" if path else "weight"
            found[name] = found.get(name, 0.0) + seen.numel() / max(1, channels)

        handles.append(module.register_forward_hook(note))
    try:
        with torch.no_grad():
            outputs = model(*call[0], **call[1])
    finally:
        for handle in handles:
            handle.remove()
    count = max(1, num_samples(call, outputs))
    return {name: times / count for name, times in found.items()}


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
    budgets = []
    for name, limit in limits.items():
        single: dict[str, list[float]] = {}
        pairs: dict[tuple[str, str], list[list[float]]] = {}
        total = fixed = 0.0
        for weight in listed:
            total += weight.amount(name, 1.0)
            kept = [[1 - share * count for count in counts[group]] for group, share in weight.axes]
            groups = [group for group, _ in weight.axes]
            if not groups:
                fixed += weight.amount(name, 1.0)
            elif len(groups) == 1 or groups[0] == groups[1]:
                shares = kept[0] if len(groups) == 1 else [a * b for a, b in zip(kept[0], kept[1], strict=True)]
                row = single.setdefault(groups[0], [0.0] * len(shares))
                amounts = [weight.amount(name, share) for share in shares]
                single[groups[0]] = [old + amount for old, amount in zip(row, amounts, strict=True)]
            else:
                first, second = (
                    (0, 1) if (groups[0], groups[1]) in pairs or (groups[1], groups[0]) not in pairs else (1, 0)
                )
                key = (groups[first], groups[second])
                table = pairs.setdefault(key, [[0.0] * len(kept[second]) for _ in kept[first]])
                for row, a in zip(table, kept[first], strict=True):
                    for place, b in enumerate(kept[second]):
                        row[place] += weight.amount(name, a * b)
        if costs:  # fixed costs are added to each option of one group, so that errors show the full numbers
            item = next(iter(costs))
            single[item] = [amount + fixed for amount in single.get(item, [0.0] * len(costs[item]))]
        told = f"{name} (ms)" if name == LATENCY else name
        budgets.append(Budget(told, limit * total, single, pairs))
    return choose(costs, budgets, gap=1e-3)


def timed_weights(
    weights: Sequence[LayerWeight], points: Mapping[float, Mapping[str, list[Unit]]], clock: Clock
) -> list[LayerWeight]:
    """The weights with the measured times of their layers; and for each group, its part of the remaining time.

    `points`: the units removed from each group at each ratio.
    """
    known = {weight.name: weight for weight in weights}
    counts = {ratio: {name: len(units) for name, units in removed.items()} for ratio, removed in points.items()}

    def share(name: str, ratio: float) -> float | None:
        if name not in known:
            return None
        return known[name].share(counts[ratio]) if ratio else 1.0

    units = {ratio: [unit for found in removed.values() for unit in found] for ratio, removed in points.items()}
    curves, rest = clock.curves(units, share)
    outputs: dict[str, float] = {}
    for weight in weights:
        if weight.made:
            outputs[weight.made] = outputs.get(weight.made, 0.0) + weight.outputs
    total = sum(outputs.values())
    others = []
    for group, count in outputs.items():
        each = next(each for weight in weights for name, each in weight.axes if name == group)
        times = tuple((left, ms * count / total) for left, ms in rest) if total else ()
        others.append(LayerWeight(f"(beside layers, {group})", 0.0, 0.0, ((group, each),), times=times))
    return [*(replace(weight, times=curves.get(weight.name, ())) for weight in weights), *others]
