"""Which units are removed: element scores become unit scores, and the lowest go, by group or over all groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sparsebit.errors import ConfigError
from sparsebit.sparse.channels.groups import Group, Unit, keeping_axes, layers_of, positions_of
from sparsebit.sparse.scoring.element_masks import num_pruned
from sparsebit.sparse.sparse_config import SparseConfig


def select_units(
    groups: Sequence[Group],
    ratios: Sequence[float],
    scores: Mapping[str, Tensor],
    config: SparseConfig,
    share: float,
    gone: frozenset[int] = frozenset(),
) -> list[Unit]:
    """The units that are removed in this step. `ratios`: of each group, at the end; `share`: the share of these ratios
    that applies after this step.

    With `SCOPE: global`, groups for which the config has no ratio of their own share one. `gone`: labels of the units
    that were removed before; they are chosen first, so that steps of a schedule only add.
    """
    wanted = [(group, share * ratio) for group, ratio in zip(groups, ratios, strict=True) if share * ratio > 0]
    is_global = config.SPARSER.SCOPE == "global"
    dead: list[Unit] = []
    together: list[tuple[Group, Tensor]] = []
    for group, ratio in wanted:
        is_gone = torch.tensor([unit.label in gone for unit in group.units])
        score = unit_scores(group, scores, config.SPARSER.STRATEGY).masked_fill(is_gone, -math.inf)
        if is_global and not config.is_overridden(layers_of(group)):
            together.append((group, score))
        else:
            dead += select(group, score, ratio)
    # The units of all these groups together that have the lowest scores.
    entries = [unit for group, _ in together for unit in group.units]
    lowest = torch.cat([score for _, score in together]) if together else torch.zeros(0)
    return dead + select(Group(tuple(entries)), lowest, share * config.SPARSER.RATIO)


def mask_units(masks: Mapping[str, Tensor], dead: Sequence[Unit]) -> None:
    """Set the masks, in place: False in the positions of these units alone."""
    for mask in masks.values():
        mask.fill_(True)
    for (tensor, dim), places in positions_of(dead).items():
        if tensor in masks:
            masks[tensor].index_fill_(dim, torch.tensor(places, device=masks[tensor].device), False)


def dead_units(units: Sequence[Unit], masks: Mapping[str, Tensor]) -> list[Unit]:
    """The units all of whose weights are masked."""
    # For each axis: whether a position has any weight left.
    left = {
        (name, dim): mask.movedim(dim, 0).flatten(1).any(1).tolist() if mask.dim() > 1 else mask.tolist()
        for name, mask in masks.items()
        for dim in range(mask.dim())
    }

    def is_dead(unit: Unit) -> bool:
        members = [(left[tensor, dim], places) for tensor, dim, places in unit.members if tensor in masks]
        return bool(members) and not any(axis[place] for axis, places in members for place in places)

    return [unit for unit in units if is_dead(unit)]


def unit_scores(group: Group, scores: Mapping[str, Tensor], strategy: str) -> Tensor:
    """One score for each unit: the mean over the axes it lies in, each axis scaled to a mean of 1.

    So a layer with large weights counts as much as one with small weights, and units of different groups compare.
    Every axis counts, both of weights that produce a channel and of weights that read it.
    """
    total = torch.zeros(len(group.units), dtype=torch.float64)
    count = torch.zeros_like(total)
    means: dict[tuple[str, int], list[float]] = {}
    for tensor, dim in group.axes:
        if tensor in scores:
            values = scores[tensor].double().cpu()
            values = values.movedim(dim, 0).flatten(1).sum(1) if values.dim() > 1 else values
            means[tensor, dim] = (values / values.mean().clamp_min(1e-300)).tolist()
    for index, unit in enumerate(group.units):
        found = [(means[tensor, dim], places) for tensor, dim, places in unit.members if (tensor, dim) in means]
        total[index] = sum(sum(values[place] for place in places) / len(places) for values, places in found)
        count[index] = len(found)
    if not bool(count.any()):
        hint = "choose another one, or spare these layers with SPARE"
        raise ConfigError(f"SPARSER.STRATEGY={strategy} judges no parameter of a group ({group}); {hint}")
    return total / count.clamp_min(1)


def select(group: Group, scores: Tensor, ratio: float) -> list[Unit]:
    """The share of the units that have the lowest scores; every axis keeps at least one unit."""
    ordered = [group.units[index] for index in scores.sort(stable=True).indices.tolist()]
    # `keeping_axes` sees all units, not only the chosen ones: it skips a unit that would empty an axis, and the next
    # one in the order takes its place.
    return keeping_axes(ordered, group)[: num_pruned(ratio, len(ordered))]


def rounded(
    groups: Sequence[Group], dead: Sequence[Unit], sizes: Mapping[str, tuple[int, ...]], multiple: int
) -> list[Unit]:
    """The dead units, minus as many of the last ones as every axis needs to keep a `multiple`, if they suffice."""
    if multiple == 1:
        return list(dead)
    kept: list[Unit] = []
    for group in groups:
        own = {unit.label for unit in group.units}
        going = [unit for unit in dead if unit.label in own]
        while going and not _fits(going, sizes, multiple):
            going.pop()
        kept += going
    return kept


def _fits(going: Sequence[Unit], sizes: Mapping[str, tuple[int, ...]], multiple: int) -> bool:
    # An axis that was not a multiple before (a head of 12 channels) cannot be required to become one.
    return all(
        len(places) % multiple == 0
        for (tensor, dim), places in positions_of(going).items()
        if sizes[tensor][dim] % multiple == 0
    )
