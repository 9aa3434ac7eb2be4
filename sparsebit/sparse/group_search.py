"""`find_groups`: the channel groups of a model, proved, with a report of what is spared and why.

The search analyses one traced run (`channels/`: which channels must be removed together). Then it removes random units
of every group and compares the smaller model with the masked one (`proof/`). After a failure it tries, in this order:
another value of an attribute that holds a size (`_repaired`), another way to carry labels through a view or a split
(`_rechosen`), and sparing the channels that fail (`_spared`). Each of them can happen a limited number of times, so the
search ends.

Every step takes an `_Attempt` and returns another one. Invariant: the groups of the last one were compared on the
example, in all scenes and on all forced branches, together. The model is neither changed nor run: all runs are on
copies.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from sparsebit.execution.batches import Call, as_call
from sparsebit.graph.values.copying import copy_model
from sparsebit.numerics.full_float32 import full_float32
from sparsebit.sparse.channel_groups import ChannelGroups, SearchCost
from sparsebit.sparse.channels.computed_weights import computed_layers, make_plain
from sparsebit.sparse.channels.groups import Group, Unit, all_spared, drawn
from sparsebit.sparse.channels.parametrized_weights import without_channels
from sparsebit.sparse.channels.wide_groups import WideGroups, find_wide_groups
from sparsebit.sparse.proof.bench import Bench, SizeRule
from sparsebit.sparse.proof.comparing import Failure, compare, compare_in, first_wrong_value
from sparsebit.sparse.proof.culprits import failing_alike, failing_groups, guilty_units
from sparsebit.sparse.proof.group_analysis import Analysis, Pins, analysed
from sparsebit.sparse.proof.other_paths import Paths, find_paths
from sparsebit.sparse.proof.probe_model import probe_of
from sparsebit.sparse.proof.scenes import Scene, natural_scenes
from sparsebit.sparse.proof.size_repairs import better_rules
from sparsebit.sparse.proof.uncalled_layers import scenes_of_uncalled

_log = logging.getLogger(__name__)
_SHARE = 0.5  # the share of the units that a proof removes, on average
_SPREAD = 0.3  # how far the share of one group may be from `_SHARE`
_NUM_DRAWS = 2


@dataclass(frozen=True)
class _Subject:
    """A copy of the model, and the ways to run it.

    `computed`: layers whose weights are computed; in `plain` all weights are plain. `scenes`: other than the example;
    `uncalled`: those of them that reach layers which the example does not call.
    """

    model: nn.Module
    call: Call
    computed: Mapping[str, str]
    plain: nn.Module
    scenes: Sequence[Scene]
    uncalled: Sequence[Scene]
    paths: Paths


@dataclass(frozen=True)
class _Attempt:
    """The options, pins and rules that are taken to be right until a comparison fails.

    `options`: of choices, how labels pass them. `pins`: atoms that stay. `analysis`: with these options and pins.
    `rules`: attributes that hold a size. `unproved`: units that failed, with the reason. `wide`: found at the end.
    """

    subject: _Subject
    analysis: Analysis
    options: Mapping[str, int] = field(default_factory=dict)
    pins: Pins = field(default_factory=dict)
    rules: tuple[SizeRule, ...] = ()
    unproved: tuple[tuple[Unit, str], ...] = ()
    wide: WideGroups = field(default_factory=WideGroups)

    @cached_property
    def bench(self) -> Bench:
        subject, analysis = self.subject, self.analysis
        return Bench(
            subject.model,
            subject.call,
            analysis.trace,
            analysis.sets,
            subject.computed,
            self.wide,
            subject.scenes,
            self.rules,
        )

    def drawn(self, seed: int, wide: Sequence[Group] = ()) -> list[Unit]:
        """Random units of all groups."""
        return drawn([*self.analysis.groups, *wide], _SHARE, torch.Generator().manual_seed(seed), _SPREAD)

    def with_option(self, key: str, option: int) -> _Attempt:
        """Another way to carry labels past a choice."""
        options = {**self.options, key: option}
        return replace(self, options=options, analysis=_analysed(self.subject, options, self.pins))

    def pinned(self, pins: Pins) -> _Attempt:
        """These atoms stay as well."""
        return replace(self, pins={**pins, **self.pins}, analysis=self.analysis.pinned(pins))

    def without(self, blamed: Mapping[int, str]) -> _Attempt:
        """Units are spared: by their labels, with the reasons."""
        failed = [(unit, f"not proved: {blamed[unit.label]}") for unit in self.analysis.units if unit.label in blamed]
        after = replace(self, unproved=(*self.unproved, *failed))
        for reason in sorted(set(blamed.values())):
            _log.debug("spared: %s", reason)
            labels = [label for label, own in blamed.items() if own == reason]
            # Pins name atoms, not labels: every analysis numbers its labels anew.
            after = after.pinned(dict.fromkeys(after.analysis.atoms(labels), f"not proved: {reason}"))
        return after


@dataclass(frozen=True)
class _Tried:
    """Steps that did not help, so that they are not tried again.

    `sites`: of failures that no attribute repairs. `options`: of choices. `positions`: of failures after which channels
    were spared.
    """

    sites: set[tuple[type, str, str]] = field(default_factory=set)
    options: set[tuple[str, int]] = field(default_factory=set)
    positions: set[tuple[int, int]] = field(default_factory=set)


@full_float32()
def find_groups(model: nn.Module, example_inputs: Any) -> ChannelGroups:
    """The channel groups of a model, each proved on the example. The model is not changed.

    `example_inputs`: a batch: a tensor, a tuple of arguments or a mapping of keywords.
    """
    start = time.perf_counter()
    subject = _subject(*probe_of(model, as_call(example_inputs, model)))
    attempt = _chosen(_Attempt(subject, _analysed(subject, {}, {})))
    # Channels whose number is used in branches that cannot be run.
    attempt = attempt.pinned(subject.paths.counted)
    num_found, found_at = len(attempt.analysis.groups), time.perf_counter()
    attempt = _widened(_proved(attempt))
    return _result(attempt, SearchCost(num_found, found_at - start, time.perf_counter() - found_at))


def _subject(model: nn.Module, call: Call) -> _Subject:
    folded = without_channels(model)
    make_plain(model, folded)
    computed = {**folded, **computed_layers(model, call)}
    plain = copy_model(model) if computed else model
    make_plain(plain, computed)
    natural = natural_scenes(model, call)
    uncalled = scenes_of_uncalled(model, call, natural)
    scenes = [*natural, *uncalled]
    return _Subject(model, call, computed, plain, scenes, uncalled, find_paths(model, call, scenes))


def _analysed(subject: _Subject, options: Mapping[str, int], pins: Pins) -> Analysis:
    return analysed(subject.plain, subject.call, options, pins, subject.uncalled)


def _chosen(attempt: _Attempt) -> _Attempt:
    """With other options where the channels that pass a choice cannot be removed."""
    # Twice, because an option of one choice may only help after another choice has changed.
    for _ in range(2):
        before = attempt.analysis.score()
        for key, num_options in _blocked(attempt.analysis):
            for option in range(1, num_options):
                other = attempt.with_option(key, option)
                if other.analysis.score() > attempt.analysis.score():
                    attempt = other
        if attempt.analysis.score() == before:
            break
    return attempt


def _blocked(analysis: Analysis) -> list[tuple[str, int]]:
    """The choices that no removable channel passes, and how many options each has; `_rechosen` handles splits."""
    found: dict[str, tuple[int, bool]] = {}
    for choice in analysis.trace.choices:
        is_free = not analysis.labels.isdisjoint(analysis.sets.roots(choice.labels).unique().tolist())
        number, was_free = found.get(choice.key, (choice.num_options, False))
        found[choice.key] = (max(number, choice.num_options), was_free or is_free)
    return [(key, number) for key, (number, is_free) in found.items() if not is_free and not key.startswith("split")]


def _proved(attempt: _Attempt) -> _Attempt:
    """Shrunk and masked agree for all that is left, in ordinary runs and on forced branches."""
    tried = _Tried()
    attempt = _proved_in_runs(attempt, tried)
    # Forced branches are compared once, when the ordinary runs agree. What they spare changes the analysis, so the
    # ordinary runs are then proved again.
    for scene in attempt.subject.paths.scenes:
        dead = attempt.drawn(0)
        if dead and (failure := compare_in(scene, attempt.bench, dead)):
            attempt = _proved_in_runs(_spared(attempt, failure, dead, tried), tried)
    return attempt


def _proved_in_runs(attempt: _Attempt, tried: _Tried) -> _Attempt:
    draw = 0
    while draw < _NUM_DRAWS and attempt.analysis.groups:
        dead = attempt.drawn(draw)
        failure = compare(attempt.bench, dead)
        if failure is not None:
            attempt = (
                _repaired(attempt, failure, dead, tried)
                or _rechosen(attempt, failure, draw, tried)
                or _spared(attempt, failure, dead, tried)
            )
        # Inner values are compared for the first draw only: that takes two more runs of the model.
        elif draw == 0 and (unselected := _unselected(attempt, dead)):
            attempt = attempt.without(unselected)
        else:
            draw += 1
    return attempt


def _unselected(attempt: _Attempt, dead: list[Unit]) -> dict[int, str]:
    """Channels of an inner value that differs although the outputs agree: the example does not select it."""
    failure = first_wrong_value(attempt.bench, dead)
    return {} if failure is None else dict.fromkeys(failure.labels & attempt.analysis.labels, failure.reason)


def _repaired(attempt: _Attempt, failure: Failure, dead: list[Unit], tried: _Tried) -> _Attempt | None:
    """With another value of an attribute that holds a size, if the run then gets further."""
    kind = type(attempt.subject.model.get_submodule(failure.where))
    site = (kind, failure.where.rpartition(".")[2], failure.steps[-1].name if failure.steps else "")
    rules = None if site in tried.sites else better_rules(attempt.bench, failure, dead, failure.position)
    if rules is None:
        tried.sites.add(site)
        return None
    return replace(attempt, rules=rules)


def _rechosen(attempt: _Attempt, failure: Failure, draw: int, tried: _Tried) -> _Attempt | None:
    """With another option of a choice that the failing channels pass, if the run then gets further.

    This is how the parts of a split lose the same places, and how a shuffle loses whole places of its parts. A size
    attribute may have to change at the same time: half of a width is the size of one of two equal parts.
    """
    analysis = attempt.analysis
    failing = set(analysis.atoms(failure.labels & analysis.labels))
    for key, option in _other_options(attempt, failure):
        if (key, option) in tried.options:
            continue
        tried.options.add((key, option))
        other = attempt.with_option(key, option)
        dead = other.drawn(draw)
        # An option that pins the failing channels is not a repair: it spares them in all modules of the class.
        if not dead or failing.isdisjoint(other.analysis.atoms(other.analysis.labels)):
            continue
        found, rules = compare(other.bench, dead), attempt.rules
        if found is not None and found.position <= failure.position:
            better = better_rules(other.bench, found, dead, failure.position)
            if better is None:
                continue
            rules = better
        # A size attribute that could not be repaired with the old labels may be repaired with the new ones.
        tried.sites.clear()
        return replace(other, rules=rules)
    return None


def _other_options(attempt: _Attempt, failure: Failure) -> Iterator[tuple[str, int]]:
    """The choices that labels of the failure pass, with each option that they do not have now."""
    for choice in attempt.analysis.trace.choices:
        if not failure.labels.isdisjoint(attempt.analysis.sets.roots(choice.labels).unique().tolist()):
            now = attempt.options.get(choice.key, 0)
            yield from ((choice.key, option) for option in range(choice.num_options) if option != now)


def _spared(attempt: _Attempt, failure: Failure, dead: list[Unit], tried: _Tried) -> _Attempt:
    """Without what fails: the channels that meet at the failure, or, where that is not enough, whole groups."""
    bench, analysis = attempt.bench, attempt.analysis
    guilty = guilty_units(bench, analysis.groups, set(failure.labels & analysis.labels), dead)
    # The labels that meet at a failure do not show the cause if the failure is in another scene (it has no labels), if
    # none of them was removed, or if sparing them before did not move the failure. Then groups are tried one by one.
    is_unclear = failure.scene is not None or failure.position in tried.positions
    tried.positions.add(failure.position)
    if is_unclear or guilty.isdisjoint(unit.label for unit in dead):
        blamed, rules = failing_groups(bench, analysis.groups, dead, failure.scene)
        return replace(attempt, rules=rules).without(blamed)
    alike = failing_alike(bench, analysis.units, failure, guilty, dead)
    return attempt.without(dict.fromkeys(guilty, failure.reason) | alike)


def _widened(attempt: _Attempt) -> _Attempt:
    """With the channels that cannot leave activations but can still leave layers, proved too."""
    analysis = attempt.analysis
    first = {(axis.tensor, axis.dim): axis.first for axis in analysis.sets.axes}
    # Sets may have been joined since these units were pinned, so their labels are looked up again.
    unproved = [
        (replace(unit, label=analysis.sets.find(first[unit.members[0][:2]] + unit.members[0][2][0])), reason)
        for unit, reason in attempt.unproved
        if unit.members[0][:2] in first
    ]
    wide = find_wide_groups(
        attempt.subject.plain, analysis.trace.steps, analysis.sets, analysis.wide, unproved, analysis.groups
    )
    widened = replace(attempt, wide=wide)
    if wide.groups and not _holds(widened, wide.groups):
        fewer = wide.without([group for group in wide.groups if not _holds(widened, [group])])
        widened = replace(attempt, wide=fewer)
        return widened if _holds(widened, fewer.groups) else attempt
    return widened


def _holds(attempt: _Attempt, wide: Sequence[Group]) -> bool:
    """Whether these groups can leave layers, together with all that leave activations too."""
    draws = [attempt.drawn(seed, wide) for seed in range(_NUM_DRAWS)]
    return all(compare(attempt.bench, dead) is None for dead in draws) and all(
        compare_in(scene, attempt.bench, draws[0]) is None for scene in attempt.subject.paths.scenes
    )


def _result(attempt: _Attempt, cost: SearchCost) -> ChannelGroups:
    analysis, wide = attempt.analysis, attempt.wide
    unproved = {unit.members: reason for unit, reason in attempt.unproved}
    # Channels that failed in activations but leave layers are removable, so the report does not list them as spared.
    widened = {
        (*entry[:2], unproved[unit.members])
        for group in wide.groups
        for unit in group.units
        if unit.members in unproved
        for entry in unit.members
    }
    spared = [entry for entry in analysis.spared if (entry.tensor, entry.dim, entry.reason) not in widened]
    spared += all_spared(entry for entry in analysis.wide if entry[0].label not in wide.reasons)
    notes = (*analysis.notes, *attempt.subject.paths.notes())
    return ChannelGroups((*analysis.groups, *wide.groups), tuple(spared), notes, attempt.bench, cost)
