"""Finds the channels that cause a difference between the shrunk and the masked model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from sparsebit.sparse.channels.groups import Group, Unit
from sparsebit.sparse.channels.labels import FIXED
from sparsebit.sparse.proof.bench import Bench, SizeRule
from sparsebit.sparse.proof.comparing import Failure, compare, compare_in
from sparsebit.sparse.proof.scenes import Scene


def guilty_units(bench: Bench, groups: Sequence[Group], suspects: set[int], dead: Sequence[Unit]) -> set[int]:
    """The units that meet at a failure and whose group also fails alone; all units that meet there if none does."""
    met = [{unit.label for unit in group.units} for group in groups]
    met = [labels for labels in met if labels & suspects]
    if len(met) > 1:
        alone = [labels for labels in met if compare(bench, [u for u in dead if u.label in labels]) is not None]
        suspects = suspects & set().union(*alone) if alone else suspects
    return suspects


def failing_alike(
    bench: Bench,
    units: Sequence[Unit],
    failure: Failure,
    guilty: set[int],
    dead: Sequence[Unit],
) -> dict[int, str]:
    """The same channels of all other modules of the class, with the reason, if those of the last one fail too.

    One class has one code: a deep model would otherwise fail in each of its blocks, one after the other.
    """
    inside = f"{failure.where}."
    own = {
        (tensor.removeprefix(inside), dim)
        for unit in units
        if unit.label in guilty
        for tensor, dim, _ in unit.members
        if failure.where and tensor.startswith(inside)
    }
    kind = type(bench.model.get_submodule(failure.where))
    paths = [path for path, module in bench.model.named_modules() if type(module) is kind and path != failure.where]
    homes = {(f"{path}.{tensor}", dim): path for path in paths for tensor, dim in own}
    alike: dict[str, set[int]] = {}
    for unit in units:
        for tensor, dim, _ in unit.members:
            if unit.label not in guilty and (tensor, dim) in homes:
                alike.setdefault(homes[tensor, dim], set()).add(unit.label)
    # One run is enough: if the last module of the class fails at the same channels, all of them are taken to fail.
    last = [unit for unit in dead if alike and unit.label in alike[list(alike)[-1]]]
    if not last or compare(bench, last) is None:
        return {}
    what = failure.reason.partition(":")[0]
    return {label: what.replace(failure.where, path, 1) for path, labels in alike.items() for label in labels}


def failing_groups(
    bench: Bench,
    groups: Sequence[Group],
    dead: Sequence[Unit],
    scene: Scene | None = None,
) -> tuple[dict[int, str], tuple[SizeRule, ...]]:
    """The labels of groups without which the proof holds, with the reason, and the rules that are left.

    `scene`: the one that fails; without one, the example and all scenes are compared.

    Groups are added to those that hold together, half of them at a time, and a half that fails is halved again: one bad
    group among n costs about 2 * log2(n) runs.
    """

    def failure_of(bench: Bench, units: Sequence[Unit]) -> Failure | None:
        return compare(bench, units) if scene is None else compare_in(scene, bench, units)

    held: list[Unit] = []
    failing: dict[int, str] = {}
    waiting = [[{unit.label for unit in group.units} for group in groups]]
    while waiting:
        part = waiting.pop()
        gone = set().union(*part)
        trial = held + [unit for unit in dead if unit.label in gone]
        failure = failure_of(bench, trial)
        if failure is not None and len(part) == 1:
            # An attribute may have been changed that has this number by chance.
            other = _without_rules_of(bench, gone)
            if len(other.rules) < len(bench.rules) and failure_of(other, trial) is None:
                bench, failure = other, None
        if failure is None:
            held = trial
        elif len(part) > 1:
            waiting += [part[len(part) // 2 :], part[: len(part) // 2]]
        else:
            failing |= dict.fromkeys(gone, failure.reason)
    return failing, bench.rules


def _without_rules_of(bench: Bench, gone: set[int]) -> Bench:
    """The bench with only the rules that count no channel of these."""
    is_alive = bench.alive(gone)
    left = (rule for rule in bench.rules if bool(is_alive[torch.tensor(rule.labels).clamp(min=FIXED)].all()))
    return replace(bench, rules=tuple(left))
