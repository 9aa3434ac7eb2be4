"""Groups whose channels are removed from layers but not from activations, since code in between relies on their number.

They are hidden channels that a norm or a mean is taken over, and groups whose removal was tried and failed (the code
hard-codes a width). In the smaller model their layers have the form of `spread_layers.py`. A residual stream that norms
read is spared: every layer of the network would have to gather its inputs and spread its outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from sparsebit.sparse.channels.groups import Group, Unit, grouped, positions_of
from sparsebit.sparse.channels.labels import LabelSets
from sparsebit.sparse.channels.spread_layers import can_spread
from sparsebit.sparse.channels.trace import TracedCall

Axis = tuple[str, int]


@dataclass(frozen=True)
class WideGroups:
    """Such groups. `reasons`: of their units, by label; `axes`: of layers, (tensor, dimension), that get smaller."""

    groups: tuple[Group, ...] = ()
    reasons: Mapping[int, str] = field(default_factory=dict)
    axes: frozenset[Axis] = frozenset()

    def without(self, failing: Iterable[Group]) -> WideGroups:
        """All groups but these."""
        labels = {unit.label for group in failing for unit in group.units}
        left = tuple(group for group in self.groups if group.units[0].label not in labels)
        reasons = {label: reason for label, reason in self.reasons.items() if label not in labels}
        return WideGroups(left, reasons, frozenset(axis for group in left for axis in group.axes) & self.axes)

    def leaving(self, unit: Unit) -> Unit:
        """The unit with only those of its positions that can be removed."""
        return replace(unit, members=tuple(entry for entry in unit.members if entry[:2] in self.axes))


def find_wide_groups(
    model: nn.Module,
    steps: Sequence[TracedCall],
    sets: LabelSets,
    normalized: Iterable[tuple[Unit, str]],
    unproved: Iterable[tuple[Unit, str]],
    narrow: Iterable[Group],
) -> WideGroups:
    """The units that layers can lose.

    `normalized`: units, with the reason, that norms and means are taken over; `unproved`: those that failed. `narrow`:
    groups that leave activations too; units that share an axis with them are spared.
    """
    layers = _Layers(model, steps, sets)
    taken = {axis for group in narrow for axis in group.axes}
    between: dict[int, tuple[Unit, str]] = {}
    for unit, reason in (*(entry for entry in normalized if layers.is_between(entry[0])), *unproved):
        if layers.has_ends(unit):
            between.setdefault(unit.label, (unit, reason))
    found: list[Group] = []
    axes: set[Axis] = set()
    for group in grouped(unit for unit, _ in between.values()):
        leaving = layers.leaving(group)
        if leaving and len(group.units) > 1 and taken.isdisjoint(group.axes):
            found.append(group)
            axes |= leaving
    reasons = {unit.label: between[unit.label][1] for group in found for unit in group.units}
    return WideGroups(tuple(found), reasons, frozenset(axes))


class _Layers:
    """Facts about the weights of linear layers and convolutions."""

    def __init__(self, model: nn.Module, steps: Iterable[TracedCall], sets: LabelSets) -> None:
        called = {step.where for step in steps}
        times = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
        self.order: dict[str, int] = {}  # of first use
        for axis in sets.axes:
            self.order.setdefault(axis.tensor, len(self.order))
        self.rows: dict[str, int] = {}  # the dimension of the outputs, for each weight
        self.modules: dict[str, nn.Module] = {}  # of weights that only their own layer reads, if it can be spread
        for path, module in model.named_modules():
            name = f"{path}.weight".removeprefix(".")
            if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)) and name in self.order:
                self.rows[name] = int(getattr(module, "transposed", False))
                if can_spread(module) and path in called and times[id(module._parameters["weight"])] == 1:
                    self.modules[name] = module

    def has_ends(self, unit: Unit) -> bool:
        """Whether one layer produces a channel and another reads it."""
        return all(self._uses(unit))

    def is_between(self, unit: Unit) -> bool:
        """Whether layers produce a channel before others read it: a residual stream is written again after it."""
        makers, readers = self._uses(unit)
        return max(makers, default=0) < min(readers, default=0)

    def _uses(self, unit: Unit) -> tuple[list[int], list[int]]:
        """When the weights that produce a channel, and the weights that read it, are first used."""
        found = [(self.order[t], dim == self.rows[t]) for t, dim, _ in unit.members if t in self.rows and dim < 2]
        return [order for order, makes in found if makes], [order for order, makes in found if not makes]

    def leaving(self, group: Group) -> set[Axis]:
        """The axes of layers from which the group can be removed."""
        places = positions_of(group.units)
        found: set[Axis] = set()
        for (tensor, dim), own in places.items():
            if tensor not in self.modules or dim > 1:
                continue
            # A layer loses rows only together with the same places of its bias; columns have no bias.
            bias = f"{tensor.removesuffix('weight')}bias", 0
            if dim == 1 or self.modules[tensor]._parameters.get("bias") is None:
                found.add((tensor, dim))
            elif sorted(places.get(bias, ())) == sorted(own):
                found |= {(tensor, dim), bias}
        return found
