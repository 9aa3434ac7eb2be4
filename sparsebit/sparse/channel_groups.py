"""`ChannelGroups`: the groups of channels that can be removed from a model, and why the others are spared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from sparsebit.sparse.channels.groups import Group, Spared, Unit
from sparsebit.sparse.channels.labels import FIXED
from sparsebit.sparse.proof.bench import Bench
from sparsebit.sparse.shrinking.surgery import ChannelPlan


@dataclass(frozen=True)
class SearchCost:
    """The cost of a search: groups before the proof, and seconds of finding and of proving."""

    num_found: int
    finding_seconds: float
    proof_seconds: float


@dataclass(frozen=True)
class ChannelGroups:
    """The removable groups of a model, and its spared channels with the reasons. Printing it shows the report."""

    groups: tuple[Group, ...]
    spared: tuple[Spared, ...]
    notes: tuple[str, ...]
    bench: Bench
    cost: SearchCost

    @property
    def units(self) -> list[Unit]:
        return [unit for group in self.groups for unit in group.units]

    def kind_of(self, group: Group) -> str:
        """`head` (of an attention), `filter` (of a convolution) or `neuron` (of linear layers alone)."""
        if any(unit.label in self._heads for unit in group.units):
            return "head"
        sizes = self.bench.sizes
        return "filter" if any(len(sizes[tensor]) > 2 for tensor, _ in group.axes) else "neuron"

    @cached_property
    def _heads(self) -> set[int]:
        """Labels along which products of activations are batched."""
        sets = self.bench.sets
        return {
            sets.find(label)
            for step in self.bench.steps
            if step.name in ("bmm", "baddbmm")
            for _, axes in step.inputs
            if len(axes) == 3 and axes[0] is not None
            for label in axes[0].tolist()
            if label > FIXED
        }

    def plan(self, dead: Iterable[Unit]) -> ChannelPlan:
        """The plan that removes these units."""
        return self.bench.plan(list(dead))

    def __str__(self) -> str:
        lines = [f"{len(self.groups)} groups of channels, {len(self.units)} units that can be removed"]
        wide = self.bench.wide.reasons
        for group in self.groups:
            reason = wide.get(group.units[0].label)
            lines.append(f"  group   {group}" + (f"; only layers lose them: {reason}" if reason else ""))
        by_reason: dict[str, list[Spared]] = {}
        for entry in self.spared:
            if entry.dim < 2:
                by_reason.setdefault(entry.reason, []).append(entry)
        for reason, entries in by_reason.items():
            names = ", ".join(f"{entry.tensor}[{entry.dim}]" for entry in entries[:3])
            more = f" and {len(entries) - 3} more" if len(entries) > 3 else ""
            lines.append(f"  spared  {names}{more}: {reason}")
        return "\n".join([*lines, *(f"  note    {note}" for note in self.notes)])
