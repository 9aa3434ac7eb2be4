"""Attributes of the user's modules that hold a size (`num_heads`), found where a smaller model fails without them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn

from sparsebit.sparse.channels.groups import Unit
from sparsebit.sparse.channels.labels import FIXED
from sparsebit.sparse.channels.trace import TracedCall
from sparsebit.sparse.proof.channel_proof import Bench, Failure, SizeRule

_MOST_OPTIONS = 16
# Where in a forward a size was seen: the number of the step, the tensor, the dimension.
Source = tuple[int, int, int]
# Size -> the labels of the dimensions that have it and shrink, and their places.
Sizes = dict[int, list[tuple[Tensor, Source | None]]]


def find_repairs(
    bench: Bench, failure: Failure, dead: Sequence[Unit], rules: Sequence[SizeRule]
) -> Iterator[list[SizeRule]]:
    """Sets of attributes, most likely first, whose change could get the run past a failure."""
    frames = _Frames(bench, dead)
    for option in itertools.islice(_options(bench, failure, frames, rules), _MOST_OPTIONS):
        yield _everywhere(bench, option, frames)


def _options(bench: Bench, failure: Failure, frames: _Frames, rules: Sequence[SizeRule]) -> Iterator[list[SizeRule]]:
    known = {(rule.module, rule.attribute, rule.item) for rule in rules}
    paths = [failure.where]
    while paths[-1]:
        paths.append(paths[-1].rpartition(".")[0])
    for path in paths:
        single: dict[tuple[str, int | None], list[SizeRule]] = {}
        sizes = {size: list(entries) for size, entries in frames.sizes(path).items()}
        if path != failure.where:
            for size, entries in frames.sizes(failure.where).items():
                sizes.setdefault(size, []).extend((labels, None) for labels, _ in entries)
        for name, item, value in _numbers(bench.model.get_submodule(path)):
            if (path, name, item) not in known:
                for labels, source in sizes.get(value, ()):
                    rule = SizeRule(path, name, item, tuple(labels.tolist()), source)
                    single.setdefault((name, item), []).append(rule)
        if not single:
            continue
        firsts = [candidates[0] for candidates in single.values()]
        yield firsts
        if len(firsts) > 1:
            yield from ([rule] for rule in firsts)
            yield from itertools.islice((list(pair) for pair in itertools.combinations(firsts, 2)), 6)
        for candidates in single.values():
            yield from ([rule] for rule in _distinct(bench, candidates)[1:3])


class _Frames:
    """The sizes that shrink in the forward of each module, each examined once."""

    def __init__(self, bench: Bench, dead: Sequence[Unit]) -> None:
        self.alive = bench.alive({unit.label for unit in dead})
        self.steps: dict[str, list[TracedCall]] = {}
        for step in bench.steps:
            self.steps.setdefault(step.where, []).append(step)
        self.found: dict[str, Sizes] = {}

    def sizes(self, path: str) -> Sizes:
        if path not in self.found:
            self.found[path] = self._changed(self.steps.get(path, ()))
        return self.found[path]

    def _changed(self, steps: Iterable[TracedCall]) -> Sizes:
        found: Sizes = {}
        for number, step in enumerate(steps):
            tensors = [*step.outputs, *(axes for _, axes in step.inputs)]
            tensors += [] if step.groups is None else [(step.groups,)]
            for place, axes in enumerate(tensors):
                for dim, labels in enumerate(axes):
                    if labels is not None and not bool(self.alive[labels.clamp(min=FIXED)].all()):
                        found.setdefault(labels.numel(), []).append((labels, (number, place, dim)))
        return found


def _distinct(bench: Bench, rules: Iterable[SizeRule]) -> list[SizeRule]:
    """Rules without those that count the same units."""
    return list({tuple(bench.sets.find(x) if x > FIXED else x for x in rule.labels): rule for rule in rules}.values())


def _everywhere(bench: Bench, option: Sequence[SizeRule], frames: _Frames) -> list[SizeRule]:
    """The same rules for all modules of the same class: what one attention needs, the others need too.

    Each gets its size from the same place of its own forward.
    """
    found: list[SizeRule] = []
    for rule in option:
        found.append(rule)
        kind = type(bench.model.get_submodule(rule.module))
        for path, module in bench.model.named_modules():
            if type(module) is not kind or path == rule.module or rule.source is None:
                continue
            value = getattr(module, rule.attribute, None)
            if rule.item is not None and isinstance(value, (tuple, list)) and rule.item < len(value):
                value = value[rule.item]
            entries = frames.sizes(path).get(value, []) if type(value) is int else []
            found += [
                SizeRule(path, rule.attribute, rule.item, tuple(labels.tolist()), source)
                for labels, source in entries
                if source == rule.source
            ]
    return found


def _numbers(module: nn.Module) -> Iterator[tuple[str, int | None, int]]:
    """The whole numbers among a module's attributes: (name, item of a tuple or list, value)."""
    for name, value in vars(module).items():
        if name.startswith("_") or name == "training":
            continue
        if type(value) is int:
            yield name, None, value
        elif type(value) in (tuple, list) and all(type(item) is int for item in value):
            yield from ((name, item, number) for item, number in enumerate(value))
