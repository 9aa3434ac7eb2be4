"""Units (positions that are removed together) and groups of units that share axes.

`find_groups` watches one run of the model (`trace.py`), joins channels as the operators tie them together, and
then proves the result (`proof/comparing.py`): channels that cannot be proved to be removable are spared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from sparsebit.sparse.channels.labels import LabelSets


@dataclass(frozen=True)
class Unit:
    """The positions, per (tensor, dimension), that are removed together. `label` is its name in the analysis."""

    label: int
    members: tuple[tuple[str, int, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Group:
    """Units that share axes, so that their number is the width of the same layers."""

    units: tuple[Unit, ...]

    @property
    def axes(self) -> list[tuple[str, int]]:
        """The axes in which the units lie: (tensor, dimension)."""
        return sorted({(tensor, dim) for unit in self.units for tensor, dim, _ in unit.members})

    def __str__(self) -> str:
        names = [f"{tensor}[{dim}]" for tensor, dim in self.axes]
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        return f"{len(self.units)} units in {shown}"


def layers_of(group: Group) -> tuple[str, ...]:
    """The names of the modules whose parameters lie in the group."""
    return tuple(sorted({tensor.rpartition(".")[0] for tensor, _ in group.axes}))


@dataclass(frozen=True)
class Spared:
    """Positions of an axis that must stay, and the reason."""

    tensor: str
    dim: int
    num_positions: int
    reason: str

    def __str__(self) -> str:
        return f"{self.tensor}[{self.dim}]: {self.num_positions} positions: {self.reason}"


def units_of(sets: LabelSets) -> tuple[list[Unit], list[tuple[Unit, str]], list[Spared]]:
    """The sets of atoms that may be removed, those that must keep their width, with the reason, and what is spared."""
    members: dict[int, dict[tuple[str, int], list[int]]] = {}
    sizes = {(axis.tensor, axis.dim): axis.size for axis in sets.axes}
    spared: Counter[tuple[str, int, str]] = Counter()
    roots, pinned = sets.roots().tolist(), sets.reasons()
    for axis in sets.axes:
        for place, root in enumerate(roots[axis.first : axis.first + axis.size]):
            if (reason := pinned.get(root)) is None:
                members.setdefault(root, {}).setdefault((axis.tensor, axis.dim), []).append(place)
            else:
                spared[axis.tensor, axis.dim, reason] += 1
    units: list[Unit] = []
    kept_wide: list[tuple[Unit, str]] = []
    wide = sets.wide()
    for root, parts in members.items():
        unit = Unit(root, tuple((*axis, tuple(places)) for axis, places in parts.items()))
        if whole := next((axis for axis, places in parts.items() if len(places) == sizes[axis]), None):
            _count(spared, unit, f"all of {whole[0]}[{whole[1]}] would have to go at once")
        elif root in wide:
            kept_wide.append((unit, wide[root]))
        else:
            units.append(unit)
    return units, kept_wide, _listed(spared)


def _count(spared: Counter[tuple[str, int, str]], unit: Unit, reason: str) -> None:
    for tensor, dim, places in unit.members:
        spared[tensor, dim, reason] += len(places)


def _listed(spared: Counter[tuple[str, int, str]]) -> list[Spared]:
    return [Spared(tensor, dim, count, reason) for (tensor, dim, reason), count in spared.items()]


def without(
    units: Iterable[Unit], spared: Iterable[Spared], pinned: Mapping[int, str]
) -> tuple[list[Unit], list[Spared]]:
    """The result of `units_of` after some sets were pinned, with their reasons, without any other change."""
    left: list[Unit] = []
    more = Counter({(x.tensor, x.dim, x.reason): x.num_positions for x in spared})
    for unit in units:
        if (reason := pinned.get(unit.label)) is None:
            left.append(unit)
        else:
            _count(more, unit, reason)
    return left, _listed(more)


def all_spared(units: Iterable[tuple[Unit, str]]) -> list[Spared]:
    """The report of units that are spared, each with its reason."""
    counts: Counter[tuple[str, int, str]] = Counter()
    for unit, reason in units:
        _count(counts, unit, reason)
    return _listed(counts)


def grouped(units: Iterable[Unit]) -> list[Group]:
    """Units that share an axis, directly or through others, are one group."""
    listed = list(units)
    parent = list(range(len(listed)))

    def find(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    first: dict[tuple[str, int], int] = {}
    for index, unit in enumerate(listed):
        for tensor, dim, _ in unit.members:
            parent[find(index)] = find(first.setdefault((tensor, dim), index))
    found: dict[int, list[Unit]] = {}
    for index, unit in enumerate(listed):
        found.setdefault(find(index), []).append(unit)
    return [Group(tuple(members)) for members in found.values()]


def positions_of(units: Iterable[Unit]) -> dict[tuple[str, int], list[int]]:
    """The positions of all these units together, by tensor and dimension."""
    found: dict[tuple[str, int], list[int]] = {}
    for unit in units:
        for tensor, dim, places in unit.members:
            found.setdefault((tensor, dim), []).extend(places)
    return found


def kept_positions(dead: Iterable[Unit], sizes: Mapping[str, tuple[int, ...]]) -> dict[str, dict[int, torch.Tensor]]:
    """For each tensor and dimension that loses positions, the positions that stay, in order."""
    kept: dict[str, dict[int, torch.Tensor]] = {}
    for (tensor, dim), places in positions_of(dead).items():
        alive = sorted(set(range(sizes[tensor][dim])).difference(places))
        kept.setdefault(tensor, {})[dim] = torch.tensor(alive, dtype=torch.long)
    return kept


def drawn(groups: Iterable[Group], share: float, generator: torch.Generator, spread: float = 0.0) -> list[Unit]:
    """Some units of every group, at random; every axis keeps one at least.

    `spread`: how far the share of each group may be from `share`: with one share for all, widths keep their ratios, and
    code that relies on a ratio (the width of a head is `embed_dim // num_heads`) would pass.
    """
    dead: list[Unit] = []
    for group in groups:
        own = share + spread * (2 * float(torch.rand((), generator=generator)) - 1)
        count = min(max(1, round(own * len(group.units))), len(group.units) - 1)
        order = torch.randperm(len(group.units), generator=generator)[:count].tolist()
        dead += keeping_axes([group.units[index] for index in order], group)
    return dead


def keeping_axes(dead: Sequence[Unit], group: Group) -> list[Unit]:
    """The units without those whose removal would empty an axis."""
    alive: dict[tuple[str, int], int] = {}
    for unit in group.units:
        for tensor, dim, _ in unit.members:
            alive[tensor, dim] = alive.get((tensor, dim), 0) + 1
    chosen = []
    for unit in dead:
        axes = {(tensor, dim) for tensor, dim, _ in unit.members}
        if all(alive[axis] > 1 for axis in axes):
            chosen.append(unit)
            for axis in axes:
                alive[axis] -= 1
    return chosen
