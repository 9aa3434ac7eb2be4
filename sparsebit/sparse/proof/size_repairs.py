"""Attributes of the user's modules that hold a size (`num_heads`), found where a smaller model fails without them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from torch import Tensor, nn

from sparsebit.sparse.channels.groups import Unit
from sparsebit.sparse.channels.labels import FIXED
from sparsebit.sparse.proof.bench import Bench, SizeRule
from sparsebit.sparse.proof.comparing import Failure, compare

_MOST_OPTIONS = 16
_NUM_REPAIRS = 5  # repairs that are compared if one helps: two attributes may hold the same number by chance
# Where in a forward a size was seen: the number of the step, the tensor, the dimension.
Source = tuple[int, int, int]
# Size -> the labels of the dimensions that have it and shrink, and their places.
Sizes = dict[int, list[tuple[Tensor, Source | None]]]


def better_rules(
    bench: Bench, failure: Failure, dead: Sequence[Unit], position: tuple[int, int]
) -> tuple[SizeRule, ...] | None:
    """Rules with which the run comes further than to this position."""
    furthest, best = position, None
    sizes_in = _shrinking(bench, dead)
    for number, option in enumerate(itertools.islice(_options(bench, failure, sizes_in), _MOST_OPTIONS)):
        if best is not None and number >= _NUM_REPAIRS:
            break
        added = _everywhere(bench, option, sizes_in)
        known = {(rule.module, rule.attribute, rule.item) for rule in added}
        others = [rule for rule in bench.rules if (rule.module, rule.attribute, rule.item) not in known]
        rules = (*others, *added)
        other = compare(replace(bench, rules=rules), dead)
        if other is None:
            return rules
        if other.position > furthest:
            furthest, best = other.position, rules
    return best


def _options(bench: Bench, failure: Failure, sizes_in: Callable[[str], Sizes]) -> Iterator[list[SizeRule]]:
    """Sets of attributes, most likely first, whose change could get the run past a failure."""
    known = {(rule.module, rule.attribute, rule.item) for rule in bench.rules}
    parts = failure.where.split(".") if failure.where else []
    # From the failing module outwards: the attribute is most often its own.
    for path in [".".join(parts[:length]) for length in range(len(parts), -1, -1)]:
        single: dict[tuple[str, int | None], list[SizeRule]] = {}
        sizes = {size: list(entries) for size, entries in sizes_in(path).items()}
        if path != failure.where:
            for size, entries in sizes_in(failure.where).items():
                sizes.setdefault(size, []).extend((labels, None) for labels, _ in entries)
        for name, item, value in _numbers(bench.model.get_submodule(path)):
            if (path, name, item) not in known:
                for labels, source in sizes.get(value, ()):
                    rule = SizeRule(path, name, item, tuple(labels.tolist()), source)
                    single.setdefault((name, item), []).append(rule)
        firsts = [candidates[0] for candidates in single.values()]
        if firsts:
            yield firsts
        if len(firsts) > 1:
            # Singly, because another attribute may hold the same number by chance; in pairs, as `num_heads` and
            # `head_dim`.
            yield from ([rule] for rule in firsts)
            yield from itertools.islice((list(pair) for pair in itertools.combinations(firsts, 2)), 6)
        for candidates in single.values():
            yield from ([rule] for rule in _distinct(bench, candidates)[1:3])


def _shrinking(bench: Bench, dead: Sequence[Unit]) -> Callable[[str], Sizes]:
    """Returns the sizes that shrink in the forward of a module, each module examined once."""
    alive = bench.alive({unit.label for unit in dead})

    @functools.cache
    def sizes(path: str) -> Sizes:
        found: Sizes = {}
        for number, step in enumerate(step for step in bench.steps if step.where == path):
            tensors = [*step.outputs, *(axes for _, axes in step.inputs), (step.groups,)]
            for place, axes in enumerate(tensors):
                for dim, labels in enumerate(axes):
                    if labels is not None and not bool(alive[labels.clamp(min=FIXED)].all()):
                        found.setdefault(labels.numel(), []).append((labels, (number, place, dim)))
        return found

    return sizes


def _distinct(bench: Bench, rules: Iterable[SizeRule]) -> list[SizeRule]:
    """Rules without those that count the same units."""
    return list({tuple(bench.sets.find(x) if x > FIXED else x for x in rule.labels): rule for rule in rules}.values())


def _everywhere(bench: Bench, option: Sequence[SizeRule], sizes_in: Callable[[str], Sizes]) -> list[SizeRule]:
    """The same rules for all modules of the class, each with the size from the same place of its own forward."""
    found: list[SizeRule] = []
    for rule in option:
        found.append(rule)
        kind = type(bench.model.get_submodule(rule.module))
        for path, module in bench.model.named_modules():
            if type(module) is not kind or path == rule.module or rule.source is None:
                continue
            numbers = {(name, item): value for name, item, value in _numbers(module)}
            entries = sizes_in(path).get(numbers.get((rule.attribute, rule.item), 0), [])
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
