"""The labels of one traced run, and the resulting removable units and groups."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from sparsebit.execution.batches import Call
from sparsebit.graph.values.copying import copy_model
from sparsebit.graph.values.nested import map_nested
from sparsebit.sparse.channels.groups import grouped, units_of, without
from sparsebit.sparse.channels.labels import LabelSets
from sparsebit.sparse.channels.trace import Trace, axes_of, watch
from sparsebit.sparse.proof.scenes import Scene
from sparsebit.sparse.shrinking.surgery import named_tensors

_READS = frozenset(("_local_scalar_dense", "is_nonzero", "equal", "allclose"))  # tensors become Python's values
# (tensor, dimension, position) -> why it must stay
Pins = Mapping[tuple[str, int, int], str]
_FACTORS = (-1.0, 100.0, -100.0, 0.0)  # of inputs, where code reads values


class Analysis:
    """The labels of one run with given options, and some atoms pinned from outside. `scenes`: runs that tie more."""

    def __init__(
        self, model: nn.Module, call: Call, options: Mapping[str, int], pins: Pins, scenes: Sequence[Scene] = ()
    ) -> None:
        self.sets = LabelSets()
        self.notes: list[str] = []
        # The next run must not see values that this one has cached.
        model = copy_model(model, share_parameters=True)
        names = {id(tensor): name for name, tensor in named_tensors(model).items()}

        def run(call: Call) -> Trace:
            found = watch(model, call, self.sets, names, options)
            for tensor in found.outputs:
                for labels in axes_of(tensor, self.sets):
                    self.sets.pin(labels, "the model returns them")
            return found

        self.trace = run(call)
        if self.trace.error is not None:
            raise self.trace.error
        self._visit_other_values(run, call)
        for scene in scenes:
            with scene.entered(model):
                run(scene.call)
        self._visit_training(model, run, call)
        self._pin_atoms(pins)
        self.units, self.wide, self.spared = units_of(self.sets)
        self.groups = grouped(self.units)

    def pinned(self, pins: Pins) -> Analysis:
        """The analysis in which these atoms stay too. Its labels are those of this one, which is no longer valid."""
        self._pin_atoms(pins)
        after = copy.copy(self)
        after.units, after.spared = without(self.units, self.spared, self.sets.reasons())
        alive = after.labels
        after.groups = []
        for group in self.groups:
            left = [unit for unit in group.units if unit.label in alive]
            # A group that lost units may fall apart into several.
            after.groups += [group] if len(left) == len(group.units) else grouped(left)
        return after

    def _pin_atoms(self, pins: Pins) -> None:
        first = {(axis.tensor, axis.dim): axis.first for axis in self.sets.axes}
        by_reason: dict[str, list[int]] = {}
        for (tensor, dim, place), reason in pins.items():
            if (tensor, dim) in first:
                by_reason.setdefault(reason, []).append(first[tensor, dim] + place)
        for reason, labels in by_reason.items():
            self.sets.pin(torch.tensor(labels), reason)

    def _visit_other_values(self, run: Callable[[Call], Trace], call: Call) -> None:
        """If code reads values of tensors, other inputs may take other paths: a few are run, to join their labels."""
        readers = sorted({step.where for step in self.trace.steps if step.name in _READS})
        if not readers:
            return
        for factor in _FACTORS:

            def scaled(x: Tensor, factor: float = factor) -> Tensor:
                return x * factor if x.is_floating_point() else x

            run(map_nested(Tensor, scaled, call))
        names = [readers[0] or "the model", *readers[1:]]
        self.notes.append(
            f"{_with_more(names)}: code reads values of tensors, and may take a path that the example does not take; "
            "compare on your data after shrink()"
        )

    def _visit_training(self, model: nn.Module, run: Callable[[Call], Trace], call: Call) -> None:
        """Layers that run in training only (auxiliary heads) are tied to the others by a run in training mode."""

        def unseen() -> list[str]:
            seen = {axis.tensor for axis in self.sets.axes}
            return [name for name, p in model.named_parameters() if name not in seen and max(p.shape, default=0) > 1]

        if not unseen():
            return
        model.train()
        error = run(call).error
        model.eval()
        if still := unseen():
            self.notes.append(f"{_with_more(still)}: never used")
        if error is not None:
            self.notes.append(f"the model does not run in training mode on the example: {error}")

    @property
    def labels(self) -> set[int]:
        """The labels of all units."""
        return {unit.label for unit in self.units}

    def score(self) -> float:
        """How many positions of parameters lie in units."""
        return float(sum(len(places) for unit in self.units for _, _, places in unit.members))

    def atoms(self, labels: Iterable[int]) -> list[tuple[str, int, int]]:
        wanted, roots = set(labels), self.sets.roots().tolist()
        return [
            (axis.tensor, axis.dim, place)
            for axis in self.sets.axes
            for place, root in enumerate(roots[axis.first : axis.first + axis.size])
            if root in wanted
        ]


def _with_more(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
