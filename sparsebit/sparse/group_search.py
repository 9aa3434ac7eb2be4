"""`find_groups`: the channel groups of a model, proved, with a report of what is spared and why.

The search analyses one traced run (`channels/`: which channels must be removed together). Then it removes random units
of every group and compares the smaller model with the masked one (`proof/`). After a failure it tries, in this order:
another value of an attribute that holds a size (`_repaired`), another way to carry labels through a view or a split
(`_rechosen`), and sparing the channels that fail (`_spare`). Each of them can happen a limited number of times, so the
search ends.

Invariant: a returned group was compared on the example, in all scenes and on all forced branches, together with all
other returned groups. The model is neither changed nor run: all runs are on copies.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import CaptureError
from sparsebit.execution.batches import Call, as_call, num_samples, rows_of
from sparsebit.graph.values.copying import copy_model
from sparsebit.numerics.full_float32 import full_float32
from sparsebit.sparse.channels.computed_weights import computed_layers, make_plain
from sparsebit.sparse.channels.groups import Group, Spared, Unit, all_spared
from sparsebit.sparse.channels.labels import FIXED
from sparsebit.sparse.channels.parametrized_weights import without_channels
from sparsebit.sparse.channels.trace import watch
from sparsebit.sparse.channels.wide_groups import WideGroups, find_wide_groups
from sparsebit.sparse.proof.channel_proof import Bench, Failure, SizeRule, drawn
from sparsebit.sparse.proof.culprits import failing_alike, failing_groups, guilty_units
from sparsebit.sparse.proof.group_analysis import Analysis
from sparsebit.sparse.proof.other_paths import find_paths
from sparsebit.sparse.proof.probe_model import double_precision, probe_copy
from sparsebit.sparse.proof.scenes import natural_scenes
from sparsebit.sparse.proof.size_repairs import find_repairs
from sparsebit.sparse.proof.uncalled_layers import scenes_of_uncalled
from sparsebit.sparse.shrinking.surgery import ChannelPlan

_log = logging.getLogger(__name__)
_SHARE = 0.5  # the share of the units that a proof removes, on average
_SPREAD = 0.3  # how far the share of one group may be from `_SHARE`
_NUM_DRAWS = 2
_NUM_REPAIRS = 5  # repairs that are compared if one helps: two attributes may hold the same number by chance
_NUM_SAMPLES = 2  # with one, a dimension of size 1 could hide an error


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


@full_float32()
def find_groups(model: nn.Module, example_inputs: Any) -> ChannelGroups:
    """The channel groups of a model, each proved on the example. The model is not changed.

    `example_inputs`: a batch: a tensor, a tuple of arguments or a mapping of keywords.
    """
    start = time.perf_counter()
    call = as_call(example_inputs, model)
    probe, call = _probe(model, call)
    folded = without_channels(probe)
    make_plain(probe, folded)
    search = _Search(probe, call, folded)
    search.choose()
    search.read()
    num_found, found_at = len(search.analysis.groups), time.perf_counter()
    search.prove()
    search.widen()
    return search.result(SearchCost(num_found, found_at - start, time.perf_counter() - found_at))


def _probe(model: nn.Module, call: Call) -> tuple[nn.Module, Call]:
    """A copy for experiments and its call: in float64 if the model runs in it, so that rounding hides no error."""
    probe = probe_copy(model)
    run = watch(copy_model(probe), call)
    if run.error is not None:
        raise CaptureError(f"the model does not run on the example inputs: {run.error}") from run.error
    call = _few_samples(probe, call, run.outputs)
    precise, inputs = double_precision(probe, call)
    again = watch(copy_model(precise), inputs)
    with torch.no_grad():  # outputs may be views that the model has written into
        is_finite = all(bool(torch.isfinite(x).all()) for x in again.outputs if x.is_floating_point())
    return (precise, inputs) if again.error is None and is_finite else (probe, call)


def _few_samples(model: nn.Module, call: Call, outputs: list[Tensor]) -> Call:
    """The call with its first two samples only, if the outputs then have two rows: a proof needs no more samples."""
    count = num_samples(call, outputs)
    if count <= _NUM_SAMPLES:
        return call
    few: Call = rows_of(call, count, 0, _NUM_SAMPLES)
    run = watch(copy_model(model), few)
    expected = [(_NUM_SAMPLES, *x.shape[1:]) if x.dim() and len(x) == count else tuple(x.shape) for x in outputs]
    is_same = run.error is None and [tuple(x.shape) for x in run.outputs] == expected
    return few if is_same else call


class _Search:
    def __init__(self, model: nn.Module, call: Call, folded: Mapping[str, str]) -> None:
        self.model, self.call = model, call
        self.computed = {**folded, **computed_layers(model, call)}
        self.traced = model if not self.computed else copy_model(model)  # its weights are all plain
        make_plain(self.traced, self.computed)
        self.options: dict[str, int] = {}
        self.pins: dict[tuple[str, int, int], str] = {}
        self.rules: list[SizeRule] = []
        self.scenes = natural_scenes(model, call)
        self.of_uncalled = scenes_of_uncalled(model, call, self.scenes)
        self.scenes += self.of_uncalled
        self.analysis = self._analyse(self.options)
        self.hopeless: set[tuple[type, str, str]] = set()
        self.tried: set[tuple[str, int]] = set()
        self.spared_at: set[tuple[int, int]] = set()
        self.unproved: list[tuple[Unit, str]] = []
        self.wide = WideGroups()
        self.paths = find_paths(model, call, self.scenes)

    def _analyse(self, options: Mapping[str, int]) -> Analysis:
        return Analysis(self.traced, self.call, options, self.pins, self.of_uncalled)

    def choose(self) -> None:
        """Try other options where the channels that pass a choice cannot be removed."""
        # Twice, because an option of one choice may only help after another choice has changed.
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
        """The choices that no removable channel passes, and how many options each has; `_rechosen` handles splits."""
        alive = {unit.label for unit in self.analysis.units}
        found: dict[str, tuple[int, bool]] = {}
        for choice in self.analysis.trace.choices:
            is_free = not alive.isdisjoint(self.analysis.sets.roots(choice.labels).unique().tolist())
            number, was_free = found.get(choice.key, (choice.num_options, False))
            found[choice.key] = (max(number, choice.num_options), was_free or is_free)
        return [
            (key, number) for key, (number, is_free) in found.items() if not is_free and not key.startswith("split")
        ]

    def _spared_unselected(self, bench: Bench, dead: list[Unit]) -> bool:
        """Pin channels of an inner value that differs although the outputs agree: the example does not select it."""
        failure = bench.first_wrong_value(dead, self.rules)
        met = set() if failure is None else failure.labels & {unit.label for unit in self.analysis.units}
        if failure is not None and met:
            self._pin_units(dict.fromkeys(met, failure.reason))
        return bool(met)

    def read(self) -> None:
        """Pin the channels whose number is used in branches that cannot be run."""
        self.pins = {**self.paths.counted, **self.pins}
        self.analysis.pin(self.paths.counted)

    def prove(self) -> None:
        """Compare shrunk with masked until all that is left agrees, in ordinary runs and on forced branches."""
        self._prove_runs()
        # Forced branches are compared once, when the ordinary runs agree. What they spare changes the analysis, so the
        # ordinary runs are then proved again.
        for scene in self.paths.scenes:
            bench, dead = self._bench(), self._drawn(0)
            if dead and (failure := bench.compare_in(scene, dead, self.rules)):
                self._spare(failure, dead)
                self._prove_runs()

    def _prove_runs(self) -> None:
        draw = 0
        while draw < _NUM_DRAWS and self.analysis.groups:
            bench, dead = self._bench(), self._drawn(draw)
            failure = bench.compare(dead, self.rules)
            if failure is None:
                # Inner values are compared for the first draw only: that takes two more runs of the model.
                draw += 0 if draw == 0 and self._spared_unselected(bench, dead) else 1
            elif not self._repaired(bench, dead, failure) and not self._rechosen(failure, draw):
                self._spare(failure, dead)

    def widen(self) -> None:
        """Find channels that cannot leave activations but can still leave layers, and prove those too."""
        analysis = self.analysis
        first = {(axis.tensor, axis.dim): axis.first for axis in analysis.sets.axes}
        # Sets may have been joined since these units were pinned, so their labels are looked up again.
        unproved = [
            (replace(unit, label=analysis.sets.find(first[unit.members[0][:2]] + unit.members[0][2][0])), reason)
            for unit, reason in self.unproved
            if unit.members[0][:2] in first
        ]
        self.wide = find_wide_groups(
            self.traced, analysis.trace.steps, analysis.sets, analysis.wide, unproved, analysis.groups
        )
        if self.wide.groups and not self._holds(self.wide.groups):
            self.wide = self.wide.without([group for group in self.wide.groups if not self._holds([group])])
            if not self._holds(self.wide.groups):
                self.wide = WideGroups()

    def _holds(self, wide: Sequence[Group]) -> bool:
        """Whether these groups can leave layers, together with all that leave activations too."""
        bench = self._bench()
        drawn = [self._drawn(draw, [*self.analysis.groups, *wide]) for draw in range(_NUM_DRAWS)]
        return all(bench.compare(dead, self.rules) is None for dead in drawn) and all(
            bench.compare_in(scene, drawn[0], self.rules) is None for scene in self.paths.scenes
        )

    def _bench(self) -> Bench:
        return Bench(
            self.model, self.call, self.analysis.trace, self.analysis.sets, self.computed, self.wide, self.scenes
        )

    def _drawn(self, seed: int, groups: Sequence[Group] | None = None) -> list[Unit]:
        wanted = self.analysis.groups if groups is None else groups
        return drawn(wanted, _SHARE, torch.Generator().manual_seed(seed), _SPREAD)

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
        """Take another option of a choice that the failing channels pass, if the run then gets further.

        This is how the parts of a split lose the same places, and how a shuffle loses whole places of its parts. A size
        attribute may have to change at the same time: half of a width is the size of one of two equal parts.
        """
        sets = self.analysis.sets
        failing = set(self.analysis.atoms(failure.labels & {unit.label for unit in self.analysis.units}))
        for choice in self.analysis.trace.choices:
            if failure.labels.isdisjoint(sets.roots(choice.labels).unique().tolist()):
                continue
            for option in range(choice.num_options):
                if (choice.key, option) in self.tried or option == self.options.get(choice.key, 0):
                    continue
                self.tried.add((choice.key, option))
                options = {**self.options, choice.key: option}
                # `_drawn` and `_bench` read `self.analysis`, so the option is set there and taken back if it does not
                # help.
                before, self.analysis = self.analysis, self._analyse(options)
                dead, rules = self._drawn(seed), None
                # An option that pins the failing channels is not a repair: it spares them in all modules of the class.
                if dead and not failing.isdisjoint(self.analysis.atoms(unit.label for unit in self.analysis.units)):
                    bench = self._bench()
                    found = bench.compare(dead, self.rules)
                    if found is None or found.position > failure.position:
                        rules = self.rules
                    else:
                        rules = self._better_rules(bench, dead, found, failure.position)
                if rules is not None:
                    self.options, self.rules = options, rules
                    # A size attribute that could not be repaired with the old labels may be repaired with the new ones.
                    self.hopeless.clear()
                    return True
                self.analysis = before
        return False

    def _spare(self, failure: Failure, dead: list[Unit]) -> None:
        """Pin what fails: the channels that meet at the failure, or, where that is not enough, whole groups."""
        gone = {unit.label for unit in dead}
        alive = {unit.label for unit in self.analysis.units}
        bench, groups = self._bench(), self.analysis.groups
        guilty = guilty_units(bench, self.rules, groups, set(failure.labels & alive), dead)
        # The labels that meet at a failure do not show the cause if the failure is in another scene (it has no labels),
        # if none of them was removed, or if sparing them before did not move the failure. Then groups are tried one by
        # one.
        if failure.scene is not None or gone.isdisjoint(guilty) or failure.position in self.spared_at:
            blamed, self.rules = failing_groups(bench, self.rules, groups, dead, failure.scene)
        else:
            alike = failing_alike(bench, self.rules, self.analysis.units, failure, guilty, dead)
            blamed = dict.fromkeys(guilty, failure.reason) | alike
        self.spared_at.add(failure.position)
        self._pin_units(blamed)

    def _pin_units(self, blamed: Mapping[int, str]) -> None:
        """Pin units, by their labels, with the reasons."""
        self.unproved += [
            (unit, f"not proved: {blamed[unit.label]}") for unit in self.analysis.units if unit.label in blamed
        ]
        for reason in sorted(set(blamed.values())):
            _log.debug("spared: %s", reason)
            labels = [label for label, own in blamed.items() if own == reason]
            # Pins name atoms, not labels: every analysis numbers its labels anew.
            pins = dict.fromkeys(self.analysis.atoms(labels), f"not proved: {reason}")
            self.pins = pins | self.pins
            self.analysis.pin(pins)

    def result(self, cost: SearchCost) -> ChannelGroups:
        analysis = self.analysis
        unproved = {unit.members: reason for unit, reason in self.unproved}
        # Channels that failed in activations but leave layers are removable, so the report does not list them as
        # spared.
        widened = {
            (*entry[:2], unproved[unit.members])
            for group in self.wide.groups
            for unit in group.units
            if unit.members in unproved
            for entry in unit.members
        }
        spared = [entry for entry in analysis.spared if (entry.tensor, entry.dim, entry.reason) not in widened]
        spared += all_spared(entry for entry in analysis.wide if entry[0].label not in self.wide.reasons)
        return ChannelGroups(
            (*analysis.groups, *self.wide.groups),
            tuple(spared),
            (*analysis.notes, *self.paths.notes()),
            self._bench(),
            tuple(self.rules),
            cost,
        )
