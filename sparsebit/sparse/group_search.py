"""`find_groups`: the channel groups of a model, proved, with a report of what is spared and why."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import CaptureError
from sparsebit.execution.batches import Call, as_call
from sparsebit.graph.copying import copy_model
from sparsebit.graph.nested import map_nested, tensors_of
from sparsebit.sparse.channel_groups import Group, Spared, Unit, grouped, units_of, without
from sparsebit.sparse.channel_proof import Bench, Failure, SizeRule, double_precision, drawn, probe_copy
from sparsebit.sparse.channel_trace import Trace, output_labels, watch
from sparsebit.sparse.computed_weights import computed_layers, make_plain
from sparsebit.sparse.labels import FIXED, LabelSets
from sparsebit.sparse.size_repairs import find_repairs
from sparsebit.sparse.surgery import ChannelPlan, named_tensors

_log = logging.getLogger(__name__)
_SHARE = 0.5  # of the units that a proof removes, in the mean
_SPREAD = 0.3  # of the shares of single groups
_NUM_DRAWS = 2
_NUM_REPAIRS = 5  # that are compared where one has carried the run further: two attributes may have the same number
_READS = frozenset(("_local_scalar_dense", "is_nonzero", "equal", "allclose"))  # tensors become Python's values
_FACTORS = (-1.0, 100.0, -100.0, 0.0)  # of inputs, where code reads values
_NUM_SAMPLES = 2  # with one, a dimension of size 1 could hide an error


@dataclass(frozen=True)
class SearchCost:
    """What a search took: groups before the proof, and seconds of finding and of proving."""

    num_found: int
    finding_seconds: float
    proof_seconds: float


@dataclass(frozen=True)
class ChannelGroups:
    """What can be removed from a model, what is spared and why. Its text is the report."""

    groups: tuple[Group, ...]
    spared: tuple[Spared, ...]
    notes: tuple[str, ...]
    bench: Bench
    rules: tuple[SizeRule, ...]
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
        return self.bench.plan(list(dead), self.rules)

    def __str__(self) -> str:
        lines = [f"{len(self.groups)} groups of channels, {len(self.units)} units that can be removed"]
        lines += [f"  group   {group}" for group in self.groups]
        by_reason: dict[str, list[Spared]] = {}
        for entry in self.spared:
            if entry.dim < 2:
                by_reason.setdefault(entry.reason, []).append(entry)
        for reason, entries in by_reason.items():
            names = ", ".join(f"{entry.tensor}[{entry.dim}]" for entry in entries[:3])
            more = f" and {len(entries) - 3} more" if len(entries) > 3 else ""
            lines.append(f"  spared  {names}{more}: {reason}")
        return "\n".join([*lines, *(f"  note    {note}" for note in self.notes)])


def find_groups(model: nn.Module, example_inputs: Any) -> ChannelGroups:
    """The channel groups of a model, each proved on the example. The model is not changed.

    `example_inputs`: a batch: a tensor, a tuple of arguments or a mapping of keywords.
    """
    start = time.perf_counter()
    call = as_call(example_inputs, model)
    probe, call = _probe(model, call)
    search = _Search(probe, call)
    search.choose()
    num_found, found_at = len(search.analysis.groups), time.perf_counter()
    search.prove()
    return search.result(SearchCost(num_found, found_at - start, time.perf_counter() - found_at))


def _probe(model: nn.Module, call: Call) -> tuple[nn.Module, Call]:
    """A copy to experiment with, which itself is never run; in float64 where the model runs in it."""
    probe = probe_copy(model)
    run = watch(copy_model(probe), call)
    if run.error is not None:
        raise CaptureError(f"the model does not run on the example inputs: {run.error}") from run.error
    call = _few_samples(probe, call, run.outputs)
    precise, inputs = double_precision(probe, call)
    again = watch(copy_model(precise), inputs)
    if again.error is None and all(bool(torch.isfinite(x).all()) for x in again.outputs if x.is_floating_point()):
        return precise, inputs
    return probe, call


def _few_samples(model: nn.Module, call: Call, outputs: list[Tensor]) -> Call:
    """The call with the first samples alone, where the model takes them one by one: a proof needs no more."""
    sizes = [len(leaf) for leaf in tensors_of(call) if leaf.dim()]
    if not sizes or sizes[0] <= _NUM_SAMPLES:
        return call

    def first(x: Tensor) -> Tensor:
        return x[:_NUM_SAMPLES] if x.dim() and len(x) == sizes[0] else x

    few: Call = map_nested(Tensor, first, call)
    run = watch(copy_model(model), few)
    expected = [(_NUM_SAMPLES, *x.shape[1:]) if x.dim() and len(x) == sizes[0] else tuple(x.shape) for x in outputs]
    is_same = run.error is None and [tuple(x.shape) for x in run.outputs] == expected
    return few if is_same else call


class _Analysis:
    """The labels of one run with given options, and some atoms pinned from outside."""

    def __init__(
        self, model: nn.Module, call: Call, options: Mapping[str, int], pins: Mapping[tuple[str, int, int], str]
    ) -> None:
        self.sets = LabelSets()
        self.notes: list[str] = []
        # What a run leaves behind (cached values) must not be seen by the next one.
        model = copy_model(model, share_parameters=True)
        names = {id(tensor): name for name, tensor in named_tensors(model).items()}
        self.trace: Trace = watch(model, call, self.sets, names, options)
        if self.trace.error is not None:
            raise self.trace.error
        for labels in output_labels(self.trace):
            self.sets.pin(labels, "the model returns them")
        self._visit_other_values(model, call, names, options)
        self._visit_training(model, call, names, options)
        self._pin_atoms(pins)
        self.units, self.spared = units_of(self.sets)
        self.groups = grouped(self.units)

    def pin(self, pins: Mapping[tuple[str, int, int], str]) -> None:
        """These atoms, (tensor, dimension, position), must stay. Units and groups are what is left."""
        self._pin_atoms(pins)
        self.units, self.spared = without(self.units, self.spared, self.sets.reasons())
        alive = {unit.label for unit in self.units}
        groups: list[Group] = []
        for group in self.groups:
            left = [unit for unit in group.units if unit.label in alive]
            groups += [group] if len(left) == len(group.units) else grouped(left)
        self.groups = groups

    def _pin_atoms(self, pins: Mapping[tuple[str, int, int], str]) -> None:
        first = {(axis.tensor, axis.dim): axis.first for axis in self.sets.axes}
        by_reason: dict[str, list[int]] = {}
        for (tensor, dim, place), reason in pins.items():
            if (tensor, dim) in first:
                by_reason.setdefault(reason, []).append(first[tensor, dim] + place)
        for reason, labels in by_reason.items():
            self.sets.pin(torch.tensor(labels), reason)

    def _visit_other_values(
        self, model: nn.Module, call: Call, names: Mapping[int, str], options: Mapping[str, int]
    ) -> None:
        """Where code reads values of tensors, other inputs may take other paths: some are tried, and tied too."""
        readers = sorted({step.where for step in self.trace.steps if step.name in _READS})
        if not readers:
            return
        for factor in _FACTORS:

            def scaled(x: Tensor, factor: float = factor) -> Tensor:
                return x * factor if x.is_floating_point() else x

            run = watch(model, map_nested(Tensor, scaled, call), self.sets, names, options)
            for labels in output_labels(run):
                self.sets.pin(labels, "the model returns them")
        self.notes.append(
            f"{readers[0] or 'the model'}"
            + (f" and {len(readers) - 1} more" if len(readers) > 1 else "")
            + ": code reads "
            "values of tensors, and may take a path that the example does not take; compare on your data after shrink()"
        )

    def _visit_training(
        self, model: nn.Module, call: Call, names: Mapping[int, str], options: Mapping[str, int]
    ) -> None:
        """Layers that run in training only (auxiliary heads) are tied to the others by a run in training mode."""
        seen = {axis.tensor for axis in self.sets.axes}
        unseen = [name for name, p in model.named_parameters() if name not in seen and max(p.shape, default=0) > 1]
        if not unseen:
            return
        model.train()
        run = watch(model, call, self.sets, names, options)
        model.eval()
        for labels in output_labels(run):
            self.sets.pin(labels, "the model returns them")
        seen = {axis.tensor for axis in self.sets.axes}
        if still := [name for name in unseen if name not in seen]:
            self.notes.append(
                f"{still[0]}" + (f" and {len(still) - 1} more" if len(still) > 1 else "") + ": never used"
            )
        if run.error is not None:
            self.notes.append(f"the model does not run in training mode on the example: {run.error}")

    def score(self) -> float:
        """How many numbers of the parameters lie in units."""
        return float(sum(len(places) for unit in self.units for _, _, places in unit.members))

    def atoms(self, labels: Iterable[int]) -> list[tuple[str, int, int]]:
        wanted, roots = set(labels), self.sets.roots().tolist()
        return [
            (axis.tensor, axis.dim, place)
            for axis in self.sets.axes
            for place, root in enumerate(roots[axis.first : axis.first + axis.size])
            if root in wanted
        ]


class _Search:
    def __init__(self, model: nn.Module, call: Call) -> None:
        self.model, self.call = model, call
        self.computed = computed_layers(model, call)
        self.traced = model if not self.computed else copy_model(model)  # its weights are all plain
        make_plain(self.traced, self.computed)
        self.options: dict[str, int] = {}
        self.pins: dict[tuple[str, int, int], str] = {}
        self.rules: list[SizeRule] = []
        self.analysis = self._analyse(self.options)
        self.hopeless: set[tuple[type, str, str]] = set()
        self.tried: set[tuple[str, int]] = set()
        self.spared_at: set[tuple[int, int]] = set()

    def _analyse(self, options: Mapping[str, int]) -> _Analysis:
        return _Analysis(self.traced, self.call, options, self.pins)

    def choose(self) -> None:
        """Try other options where the channels that pass a choice cannot be removed."""
        for _ in range(2):
            before = self.analysis.score()
            for key, num_options in self._blocked():
                for option in range(1, num_options):
                    options = {**self.options, key: option}
                    other = self._analyse(options)
                    if other.score() > self.analysis.score():
                        self.options, self.analysis = options, other
            if self.analysis.score() == before:
                return

    def _blocked(self) -> list[tuple[str, int]]:
        """Choices all of whose labels are pinned or whole axes."""
        alive = {unit.label for unit in self.analysis.units}
        found: dict[str, tuple[int, bool]] = {}
        for choice in self.analysis.trace.choices:
            is_free = not alive.isdisjoint(self.analysis.sets.roots(choice.labels).unique().tolist())
            number, was_free = found.get(choice.key, (choice.num_options, False))
            found[choice.key] = (max(number, choice.num_options), was_free or is_free)
        return [
            (key, number) for key, (number, is_free) in found.items() if not is_free and not key.startswith("split")
        ]

    def prove(self) -> None:
        """Compare shrunk with masked until all that is left agrees."""
        draw = 0
        while draw < _NUM_DRAWS and self.analysis.groups:
            bench, dead = self._bench(), self._drawn(draw)
            failure = bench.compare(dead, self.rules)
            if failure is None:
                draw += 1
            elif not self._repaired(bench, dead, failure) and not self._rechosen(failure, draw):
                self._spare(failure, dead)

    def _bench(self) -> Bench:
        return Bench(self.model, self.call, self.analysis.trace, self.analysis.sets, self.computed)

    def _drawn(self, seed: int) -> list[Unit]:
        return drawn(self.analysis.groups, _SHARE, torch.Generator().manual_seed(seed), _SPREAD)

    def _repaired(self, bench: Bench, dead: list[Unit], failure: Failure) -> bool:
        kind = type(self.model.get_submodule(failure.where))
        site = (kind, failure.where.rpartition(".")[2], failure.steps[-1].name if failure.steps else "")
        if site in self.hopeless:
            return False
        rules = self._better_rules(bench, dead, failure, failure.position)
        if rules is None:
            self.hopeless.add(site)
            return False
        self.rules = rules
        return True

    def _better_rules(
        self, bench: Bench, dead: list[Unit], failure: Failure, position: tuple[int, int]
    ) -> list[SizeRule] | None:
        """Rules with which the run comes further than to this position."""
        furthest, best = position, None
        for number, option in enumerate(find_repairs(bench, failure, dead, self.rules)):
            if best is not None and number >= _NUM_REPAIRS:
                break
            known = {(rule.module, rule.attribute, rule.item) for rule in option}
            rules = [rule for rule in self.rules if (rule.module, rule.attribute, rule.item) not in known] + option
            other = bench.compare(dead, rules)
            if other is None:
                return rules
            if other.position > furthest:
                furthest, best = other.position, rules
        return best

    def _rechosen(self, failure: Failure, seed: int) -> bool:
        """Take another option of a choice that the failing channels pass, where that carries the run further.

        So the parts of a split come to lose the same places, and a shuffle comes to lose whole places of its parts. An
        attribute may have to follow at the same time: half of a width is the size of one of two equal parts.
        """
        sets = self.analysis.sets
        for choice in self.analysis.trace.choices:
            if failure.labels.isdisjoint(sets.roots(choice.labels).unique().tolist()):
                continue
            for option in range(choice.num_options):
                if (choice.key, option) in self.tried or option == self.options.get(choice.key, 0):
                    continue
                self.tried.add((choice.key, option))
                options = {**self.options, choice.key: option}
                before, self.analysis = self.analysis, self._analyse(options)
                dead, rules = self._drawn(seed), None
                if dead:
                    bench = self._bench()
                    found = bench.compare(dead, self.rules)
                    if found is None or found.position > failure.position:
                        rules = self.rules
                    else:
                        rules = self._better_rules(bench, dead, found, failure.position)
                if rules is not None:
                    self.options, self.rules = options, rules
                    self.hopeless.clear()
                    return True
                self.analysis = before
        return False

    def _spare(self, failure: Failure, dead: list[Unit]) -> None:
        """Pin what fails: the channels that meet at the failure, or, where that is not enough, whole groups."""
        gone = {unit.label for unit in dead}
        alive = {unit.label for unit in self.analysis.units}
        blamed = dict.fromkeys(self._guilty(set(failure.labels & alive), dead), failure.reason)
        if gone.isdisjoint(blamed) or failure.position in self.spared_at:
            blamed = self._failing_groups(dead)
        self.spared_at.add(failure.position)
        for reason in sorted(set(blamed.values())):
            _log.debug("spared: %s", reason)
            labels = [label for label, own in blamed.items() if own == reason]
            pins = dict.fromkeys(self.analysis.atoms(labels), f"not proved: {reason}")
            self.pins = pins | self.pins
            self.analysis.pin(pins)

    def _guilty(self, suspects: set[int], dead: list[Unit]) -> set[int]:
        """Of the units that meet at a failure, those whose group fails alone; all of them where none does."""
        groups = [{unit.label for unit in group.units} for group in self.analysis.groups]
        groups = [labels for labels in groups if labels & suspects]
        if len(groups) > 1:
            bench = self._bench()
            alone = [
                labels
                for labels in groups
                if bench.compare([u for u in dead if u.label in labels], self.rules) is not None
            ]
            suspects = suspects & set().union(*alone) if alone else suspects
        return suspects

    def _failing_groups(self, dead: list[Unit]) -> dict[int, str]:
        """The labels of groups without which the proof holds, with the reason; found by halving.

        Groups are added to those that hold together, half of them at a time, and a half that fails is halved again: one
        bad group among n costs about 2 * log2(n) runs.
        """
        bench = self._bench()
        labels = [{unit.label for unit in group.units} for group in self.analysis.groups]
        held: list[Unit] = []
        failing: dict[int, str] = {}
        waiting = [labels]
        while waiting:
            part = waiting.pop()
            gone = set().union(*part)
            trial = held + [unit for unit in dead if unit.label in gone]
            failure = bench.compare(trial, self.rules)
            # An attribute may have been changed that has this number by chance.
            rules = self._without_rules_of(bench, gone) if failure is not None and len(part) == 1 else self.rules
            if len(rules) < len(self.rules) and bench.compare(trial, rules) is None:
                self.rules, failure = rules, None
            if failure is None:
                held = trial
            elif len(part) > 1:
                waiting += [part[len(part) // 2 :], part[: len(part) // 2]]
            else:
                failing |= dict.fromkeys(gone, failure.reason)
        return failing

    def _without_rules_of(self, bench: Bench, gone: set[int]) -> list[SizeRule]:
        """The rules that count no channel of these."""
        is_alive = bench.alive(gone)
        return [rule for rule in self.rules if bool(is_alive[torch.tensor(rule.labels).clamp(min=FIXED)].all())]

    def result(self, cost: SearchCost) -> ChannelGroups:
        analysis = self.analysis
        return ChannelGroups(
            tuple(analysis.groups),
            tuple(analysis.spared),
            tuple(analysis.notes),
            self._bench(),
            tuple(self.rules),
            cost,
        )
