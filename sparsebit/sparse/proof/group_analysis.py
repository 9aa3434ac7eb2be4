"""The labels of one traced run, and the resulting removable units and groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from sparsebit.execution.batches import Call
from sparsebit.graph.values.copying import copy_model
from sparsebit.graph.values.nested import map_nested
from sparsebit.sparse.channels.groups import Group, Spared, Unit, grouped, units_of, without
from sparsebit.sparse.channels.labels import LabelSets
from sparsebit.sparse.channels.trace import Trace, axes_of, watch
from sparsebit.sparse.proof.scenes import Scene
from sparsebit.sparse.shrinking.surgery import named_tensors

_READS = frozenset(("_local_scalar_dense", "is_nonzero", "equal", "allclose"))  # tensors become Python's values
# (tensor, dimension, position) -> why it must stay
Pins = Mapping[tuple[str, int, int], str]
_FACTORS = (-1.0, 100.0, -100.0, 0.0)  # of inputs, where code reads values


@dataclass(frozen=True)
class Analysis:
    """The labels of a model, and the units and groups that they leave.

    `trace`: the run on the example. `wide`: units that must keep their width, with the reason.
    """

    trace: Trace
    sets: LabelSets
    notes: tuple[str, ...]
    units: list[Unit]
    wide: list[tuple[Unit, str]]
    spared: list[Spared]
    groups: list[Group]

    def pinned(self, pins: Pins) -> Analysis:
        """A new analysis, in which these atoms stay too, with the same labels. Do not use this one afterwards."""
        _pin_atoms(self.sets, pins)
        units, spared = without(self.units, self.spared, self.sets.reasons())
        alive = {unit.label for unit in units}
        groups: list[Group] = []
        for group in self.groups:
            left = [unit for unit in group.units if unit.label in alive]
            # A group that lost units may fall apart into several.
            groups += [group] if len(left) == len(group.units) else grouped(left)
        return replace(self, units=units, spared=spared, groups=groups)

    @property
    def labels(self) -> set[int]:
        """The labels of all units."""
        return {unit.label for unit in self.units}

    def score(self) -> float:
        """How many positions of parameters lie in units."""
        return float(sum(len(places) for unit in self.units for _, _, places in unit.members))

    def atoms(self, labels: Iterable[int]) -> list[tuple[str, int, int]]:
        """The positions of parameters and buffers that have these labels."""
        wanted, roots = set(labels), self.sets.roots().tolist()
        return [
            (axis.tensor, axis.dim, place)
            for axis in self.sets.axes
            for place, root in enumerate(roots[axis.first : axis.first + axis.size])
            if root in wanted
        ]


def analysed(
    model: nn.Module, call: Call, options: Mapping[str, int], pins: Pins, scenes: Sequence[Scene] = ()
) -> Analysis:
    """The labels of one run with given options, and some atoms pinned from outside. `scenes`: runs that tie more."""
    sets = LabelSets()
    # The next run must not see values that this one has cached.
    model = copy_model(model, share_parameters=True)
    names = {id(tensor): name for name, tensor in named_tensors(model).items()}

    def run(call: Call) -> Trace:
        found = watch(model, call, sets, names, options)
        for tensor in found.outputs:
            for labels in axes_of(tensor, sets):
                sets.pin(labels, "the model returns them")
        return found

    trace = run(call)
    if trace.error is not None:
        raise trace.error
    notes = _visit_other_values(trace, run, call)
    for scene in scenes:
        with scene.entered(model):
            run(scene.call)
    notes += _visit_training(model, sets, run, call)
    _pin_atoms(sets, pins)
    units, wide, spared = units_of(sets)
    return Analysis(trace, sets, tuple(notes), units, wide, spared, grouped(units))


def _pin_atoms(sets: LabelSets, pins: Pins) -> None:
    first = {(axis.tensor, axis.dim): axis.first for axis in sets.axes}
    by_reason: dict[str, list[int]] = {}
    for (tensor, dim, place), reason in pins.items():
        if (tensor, dim) in first:
            by_reason.setdefault(reason, []).append(first[tensor, dim] + place)
    for reason, labels in by_reason.items():
        sets.pin(torch.tensor(labels), reason)


def _visit_other_values(trace: Trace, run: Callable[[Call], Trace], call: Call) -> list[str]:
    """If code reads values of tensors, other inputs may take other paths: a few are run, to join their labels."""
    readers = sorted({step.where for step in trace.steps if step.name in _READS})
    if not readers:
        return []
    for factor in _FACTORS:

        def scaled(x: Tensor, factor: float = factor) -> Tensor:
            return x * factor if x.is_floating_point() else x

        run(map_nested(Tensor, scaled, call))
    names = [readers[0] or "the model", *readers[1:]]
    path = "code reads values of tensors, and may take a path that the example does not take"
    return [f"{_with_more(names)}: {path}; compare on your data after shrink()"]


def _visit_training(model: nn.Module, sets: LabelSets, run: Callable[[Call], Trace], call: Call) -> list[str]:
    """Layers that run in training only (auxiliary heads) are tied to the others by a run in training mode."""

    def unseen() -> list[str]:
        seen = {axis.tensor for axis in sets.axes}
        return [name for name, p in model.named_parameters() if name not in seen and max(p.shape, default=0) > 1]

    if not unseen():
        return []
    model.train()
    error = run(call).error
    model.eval()
    still = unseen()
    notes = [f"{_with_more(still)}: never used"] if still else []
    return notes + ([f"the model does not run in training mode on the example: {error}"] if error is not None else [])


def _with_more(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
