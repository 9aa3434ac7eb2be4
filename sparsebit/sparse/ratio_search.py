"""Ratios per group under a budget: how much of each group goes, by the integer program that also chooses bits.

Each group of channels is an item, each ratio an option. An option costs what the model's output loses when this group
alone is pruned so far, measured on data. The MACs and bytes of a layer are a product of the widths of the two groups
that its weight lies in, so they are pairs in the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.execution.batches import Call
from sparsebit.graph.copying import copy_model
from sparsebit.graph.nested import tensors_of
from sparsebit.numerics.choice_program import Budget, Choice, choose
from sparsebit.sparse.channel_groups import Group, Unit
from sparsebit.sparse.channel_proof import mask_units
from sparsebit.sparse.model_size import ModelSize, model_size
from sparsebit.sparse.surgery import ChannelPlan, apply_plan
from sparsebit.sparse.unit_selection import select_by_group

BUDGETS = ("macs", "bytes")
CANDIDATES = (0.0, 0.0625, 0.125, 0.1875, 0.25, 0.375, 0.5, 0.625, 0.75)


@dataclass(frozen=True)
class RatioChoice:
    """The ratio of each group, by the first of its axes, and the size of the model before and after.

    `costs`: for each group the relative squared error of the model's output at the chosen ratio, when it is pruned
    alone.
    """

    ratios: Mapping[str, float]
    costs: Mapping[str, float]
    before: ModelSize
    after: ModelSize

    def __str__(self) -> str:
        lines = [
            f"{name}: {getattr(self.before, name):,.0f} -> {getattr(self.after, name):,.0f} "
            f"({getattr(self.after, name) / max(1, getattr(self.before, name)):.3f})"
            for name in ("macs", "parameters", "bytes")
        ]
        return "\n".join([*lines, *(f"  {ratio:6.3f}  {name}" for name, ratio in self.ratios.items())])


@dataclass(frozen=True)
class _Weight:
    """What one parameter takes as a whole, and which groups its first two axes lie in: (group, share per unit)."""

    macs: float
    bytes: float
    axes: tuple[tuple[str, float], ...]


def group_name(group: Group) -> str:
    """The first axis of the group, of a weight where it has one: `layer1.0.conv1.weight`."""
    made = [tensor for tensor, dim in group.axes if dim == 0 and tensor.endswith("weight")]
    return next(iter(made), group.axes[0][0])


def check_budgets(budgets: Mapping[str, float]) -> None:
    for name, limit in budgets.items():
        if name not in BUDGETS:
            raise ConfigError(f"budget {name!r}: allowed: {', '.join(BUDGETS)}")
        if not limit > 0:
            raise ConfigError(f"budget {name}={limit:g}: a number above 0; up to 1 it is a share of the dense model")
    if not budgets:
        raise ConfigError(f"no budget was given; allowed: {', '.join(BUDGETS)}")


def search_ratios(
    model: nn.Module,
    groups: Mapping[str, Group],
    scores: Mapping[str, Tensor],
    ratios: Mapping[str, Sequence[float]],
    budgets: Mapping[str, float],
    *,
    calls: Sequence[Call],
    plan: Callable[[list[Unit]], ChannelPlan],
    example: Any,
) -> RatioChoice:
    """The ratio of each group, out of `ratios`, with which the smaller model keeps the budgets and loses least.

    `scores`: of the units of each group. `plan`: what removes units. The sizes are counted on the smaller model itself.
    """
    costs = measured_costs(model, groups, scores, ratios, calls)
    removed = {
        name: [select_by_group([group], [scores[name]], [ratio]) for ratio in ratios[name]]
        for name, group in groups.items()
    }
    counts = {name: [len(units) for units in options] for name, options in removed.items()}
    weights, before = weights_of(model, groups, calls[0]), model_size(model, example)
    wanted = {name: limit if limit <= 1 else limit / getattr(before, name) for name, limit in budgets.items()}
    limits = dict(wanted)
    while True:
        options = choose_options(costs, counts, weights, limits).options
        small = copy_model(model)
        apply_plan(small, plan([unit for name in groups for unit in removed[name][options[name]]]))
        after = model_size(small, example)
        over = {name: getattr(after, name) / getattr(before, name) / share for name, share in wanted.items()}
        if max(over.values()) <= 1:
            break
        # The program counts layers; what the model computes or holds beside them is only seen in the model itself.
        limits = {name: share * min(1.0, 0.998 / over[name]) for name, share in limits.items()}
    chosen = {name: ratios[name][options[name]] for name in groups}
    return RatioChoice(chosen, {name: costs[name][options[name]] for name in groups}, before, after)


@torch.no_grad()
def measured_costs(
    model: nn.Module,
    groups: Mapping[str, Group],
    scores: Mapping[str, Tensor],
    candidates: Mapping[str, Sequence[float]],
    batches: Sequence[Call],
) -> dict[str, list[float]]:
    """For each group and ratio: the relative squared error of the model's output when it is pruned alone."""
    if not batches:
        raise CalibrationError("choose_ratios: no batch was given; give a few batches of inputs")
    trial = copy_model(model).eval()
    dense = [_outputs(trial, call) for call in batches]
    energy = sum(float(x.square().sum()) for outputs in dense for x in outputs) or 1.0
    tensors = dict(trial.named_parameters())
    found: dict[str, list[float]] = {}
    for name, group in groups.items():
        before = {tensor: tensors[tensor].clone() for tensor, _ in group.axes if tensor in tensors}
        found[name] = []
        for ratio in candidates[name]:  # from less to more: what is pruned stays pruned
            mask_units(trial, select_by_group([group], [scores[name]], [ratio]))
            error = sum(
                float((x - y).square().sum())
                for call, outputs in zip(batches, dense, strict=True)
                for x, y in zip(_outputs(trial, call), outputs, strict=True)
            )
            found[name].append(error / energy if ratio else 0.0)
        for tensor, value in before.items():
            tensors[tensor].copy_(value)
    return found


def _outputs(model: nn.Module, call: Call) -> list[Tensor]:
    return [x.double() for x in tensors_of(model(*call[0], **call[1])) if x.is_floating_point()]


def weights_of(model: nn.Module, groups: Mapping[str, Group], call: Call) -> list[_Weight]:
    """What every parameter takes, with the groups of its axes."""
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
        size = parameter.numel()
        found.append(_Weight(size * positions.get(name, 0.0), float(size * parameter.element_size()), axes))
    return found


def _positions(model: nn.Module, call: Call) -> dict[str, float]:
    """How often each weight of a convolution or a linear layer is multiplied with in one call."""
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
            model(*call[0], **call[1])
    finally:
        for handle in handles:
            handle.remove()
    return found


def choose_options(
    costs: Mapping[str, Sequence[float]],
    counts: Mapping[str, Sequence[int]],
    weights: Iterable[_Weight],
    limits: Mapping[str, float],
) -> Choice:
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
            size = getattr(weight, name)
            total += size
            kept = {
                place: [1 - share * count for count in counts[group]]
                for place, (group, share) in enumerate(weight.axes)
            }
            groups = [group for group, _ in weight.axes]
            if not groups:
                fixed += size
            elif len(groups) == 1 or groups[0] == groups[1]:
                shares = kept[0] if len(groups) == 1 else [a * b for a, b in zip(kept[0], kept[1], strict=True)]
                row = single.setdefault(groups[0], [0.0] * len(shares))
                single[groups[0]] = [old + size * share for old, share in zip(row, shares, strict=True)]
            else:
                first, second = (
                    (0, 1) if (groups[0], groups[1]) in pairs or (groups[1], groups[0]) not in pairs else (1, 0)
                )
                key = (groups[first], groups[second])
                table = pairs.setdefault(key, [[0.0] * len(kept[second]) for _ in kept[first]])
                for row, a in zip(table, kept[first], strict=True):
                    for place, b in enumerate(kept[second]):
                        row[place] += size * a * b
        budgets.append(Budget(name, limit * total - fixed, single, pairs))
    return choose(costs, budgets, gap=1e-3)
