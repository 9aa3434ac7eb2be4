"""Which units are removed: element scores become unit scores, and the lowest go, by group or over all groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sparsebit.errors import ConfigError
from sparsebit.sparse.channels.groups import Group, Unit, layers_of, positions_of
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
    strategy, is_global = config.SPARSER.STRATEGY, config.SPARSER.SCOPE == "global"
    found = [_gone_first(group, unit_scores(group, scores, strategy), gone) for group, _ in wanted]
    rest = [i for i, (group, _) in enumerate(wanted) if is_global and not config.is_overridden(layers_of(group))]
    own = [i for i in range(len(wanted)) if i not in rest]
    return [
        *select_by_group([wanted[i][0] for i in own], [found[i] for i in own], [wanted[i][1] for i in own]),
        *select_globally([wanted[i][0] for i in rest], [found[i] for i in rest], share * config.SPARSER.RATIO),
    ]


def _gone_first(group: Group, scores: Tensor, gone: frozenset[int]) -> Tensor:
    is_gone = torch.tensor([unit.label in gone for unit in group.units])
    return scores.masked_fill(is_gone, -math.inf)


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
    count = torch.zeros(len(group.units), dtype=torch.float64)
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
        raise ConfigError(
            f"SPARSER.STRATEGY={strategy}: it judges none of the parameters of a group ({group}); choose another one, "
            "or spare these layers with SPARE"
        )
    return total / count.clamp_min(1)


def select_by_group(groups: Sequence[Group], scores: Sequence[Tensor], ratios: Sequence[float]) -> list[Unit]:
    """In each group the share that its ratio asks for; every axis keeps at least one unit."""
    dead: list[Unit] = []
    for group, score, ratio in zip(groups, scores, ratios, strict=True):
        order = score.sort(stable=True).indices.tolist()
        dead += _taken([(group, index) for index in order], num_pruned(ratio, len(group.units)))
    return dead


def select_globally(groups: Sequence[Group], scores: Sequence[Tensor], ratio: float) -> list[Unit]:
    """The share of the units of all groups together that have the lowest scores; every axis keeps at least one."""
    entries = [(group, index) for group in groups for index in range(len(group.units))]
    order = torch.cat(list(scores)).sort(stable=True).indices.tolist() if entries else []
    return _taken([entries[place] for place in order], num_pruned(ratio, len(entries)))


def _taken(ordered: Sequence[tuple[Group, int]], count: int) -> list[Unit]:
    alive: dict[tuple[str, int], int] = {}
    for group in {id(group): group for group, _ in ordered}.values():
        for unit in group.units:
            for tensor, dim, _ in unit.members:
                alive[tensor, dim] = alive.get((tensor, dim), 0) + 1
    taken: list[Unit] = []
    for group, index in ordered:
        if len(taken) == count:
            break
        unit = group.units[index]
        axes = {(tensor, dim) for tensor, dim, _ in unit.members}
        if all(alive[axis] > 1 for axis in axes):
            taken.append(unit)
            for axis in axes:
                alive[axis] -= 1
    return taken


def rounded(
    groups: Sequence[Group], dead: Sequence[Unit], sizes: Mapping[str, tuple[int, ...]], multiple: int
) -> list[Unit]:
    """The dead units, minus as many of the last ones as every axis needs to keep a multiple of `multiple` positions,
    if they suffice.
    """
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
    lost: dict[tuple[str, int], int] = {}
    for unit in going:
        for tensor, dim, places in unit.members:
            lost[tensor, dim] = lost.get((tensor, dim), 0) + len(places)
    # An axis that was not a multiple before (a head of 12 channels) cannot be required to become one.
    return all(
        (sizes[tensor][dim] - count) % multiple == 0
        for (tensor, dim), count in lost.items()
        if sizes[tensor][dim] % multiple == 0
    )
