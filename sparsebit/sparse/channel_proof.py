"""Proof of channel groups: the shrunk model must compute what the masked model computes.

Units are drawn at random. One copy of the model gets zeros in all their parameters, another loses them. Both run; the
sizes that every operator of the smaller one gives are compared with the sizes that the labels foretell, so that a
failure names the operator, the module and the groups that meet there. Attributes of the user's modules that hold a
size (`num_heads`) are changed where that carries the run further. Groups that still fail are spared.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparsebit.execution.batches import Call
from sparsebit.graph.copying import copy_model
from sparsebit.graph.nested import map_nested
from sparsebit.sparse.channel_groups import Group, Unit, kept_positions, positions_of
from sparsebit.sparse.channel_trace import Step, Trace, outputs_of, watch
from sparsebit.sparse.labels import FIXED, LabelSets
from sparsebit.sparse.surgery import Attribute, ChannelPlan, apply_plan, named_tensors

TOLERANCE = 1e-5
# A linear layer is one of these, or two, by the strides of its input.
_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "add"))


@dataclass(frozen=True)
class SizeRule:
    """An attribute of a module (or one item of it) that must be the number of surviving labels."""

    module: str
    attribute: str
    item: int | None
    labels: tuple[int, ...]
    # Where in the module's forward the size was seen.
    source: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Failure:
    """Why a shrunk model is not the masked one: where it shows, and which labels meet there."""

    # How far the run came: the operators that compute, then those that move values.
    position: tuple[int, int]
    where: str
    reason: str
    labels: frozenset[int]
    steps: tuple[Step, ...] = ()


class Bench:
    """A model, an example call and the labels of one traced run: what every proof needs."""

    def __init__(self, model: nn.Module, call: Call, trace: Trace, sets: LabelSets) -> None:
        self.model, self.call, self.sets, self.steps = model, call, sets, trace.steps
        self.dense_outputs = trace.outputs
        self.sizes = {name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()}

    def plan(self, dead: Sequence[Unit], rules: Iterable[SizeRule]) -> ChannelPlan:
        """The plan that removes these units."""
        alive = self._alive({unit.label for unit in dead})
        kept = kept_positions(dead, self.sizes)
        attributes: dict[str, dict[str, Attribute]] = {}
        for rule in (*rules, *self._group_rules()):
            size = int(alive[torch.tensor(rule.labels).clamp(min=FIXED)].sum())
            module = self.model.get_submodule(rule.module)
            value = attributes.get(rule.module, {}).get(rule.attribute, getattr(module, rule.attribute))
            changed: Attribute = size
            if rule.item is not None:
                items = list(value)
                items[rule.item] = size
                changed = type(value)(items)
            if changed != getattr(module, rule.attribute):
                attributes.setdefault(rule.module, {})[rule.attribute] = changed
        return ChannelPlan(
            {tensor: {dim: tuple(places.tolist()) for dim, places in dims.items()} for tensor, dims in kept.items()},
            attributes,
        )

    def _group_rules(self) -> Iterator[SizeRule]:
        """The numbers of groups of convolutions and group norms."""
        for step in self.steps:
            if step.groups is None:
                continue
            module = self.model.get_submodule(step.where)
            name = "num_groups" if isinstance(module, nn.GroupNorm) else "groups"
            if isinstance(module, (nn.modules.conv._ConvNd, nn.GroupNorm)):
                yield SizeRule(step.where, name, None, tuple(step.groups.tolist()))

    def _alive(self, gone: set[int]) -> Tensor:
        """For every label: whether it survives."""
        return ~torch.isin(self.sets.roots(), torch.tensor(sorted(gone), dtype=torch.long))

    def expected(self, step: Step, alive: Tensor) -> tuple[tuple[int | None, ...], ...]:
        """The sizes of a step's outputs after the removal; None: not known."""
        return tuple(
            tuple(_count(labels, size, alive) for labels, size in zip(axes, shape, strict=True))
            for axes, shape in zip(step.outputs, step.shapes, strict=True)
        )

    def masked(self, dead: Sequence[Unit]) -> nn.Module:
        """A copy with zeros in every parameter of the units; buffers stay."""
        copied = copy_model(self.model)
        mask_units(copied, dead)
        return copied

    def shrunk(self, plan: ChannelPlan) -> nn.Module:
        copied = copy_model(self.model)
        apply_plan(copied, plan)
        return copied

    def compare(self, dead: Sequence[Unit], rules: Sequence[SizeRule]) -> Failure | None:
        """None where the shrunk model equals the masked one on the example."""
        gone = {unit.label for unit in dead}
        run = watch(self.shrunk(self.plan(dead, rules)), self.call)
        if failure := self._first_difference(run, gone):
            return failure
        if _agrees(outputs_of(self.masked(dead), self.call), run.outputs, self.dense_outputs):
            return None
        return self._first_wrong_value(dead, rules, gone)

    def _first_difference(self, run: Trace, gone: set[int]) -> Failure | None:
        expected = [(index, step) for index, step in enumerate(self.steps) if not step.is_move]
        actual = [step for step in run.steps if not step.is_move]
        previous, alive = 0, self._alive(gone)
        for position, ((index, step), found) in enumerate(zip(expected, actual, strict=False)):
            if run.error is None and step.name != found.name and {step.name, found.name} <= _PRODUCTS:
                return None  # strides choose among them (one channel that is left is contiguous): the outputs decide
            wanted = self.expected(step, alive)
            if step.name != found.name or not _fits(wanted, found.shapes):
                reason = (
                    f"{found.name} in {found.where or 'the model'} gives {_shown(found.shapes)}, not {_shown(wanted)}"
                )
                return self._failure(position, found.where, reason, self.steps[previous : index + 1])
            previous = index + 1
        if run.error is None and len(expected) == len(actual):
            return None
        position = min(len(expected), len(actual))
        last = expected[position][0] if position < len(expected) else len(self.steps) - 1
        where = run.pending.where if run.pending else (self.steps[last].where if self.steps else "")
        steps = self.steps[previous : last + 1]
        if run.pending and (same := [step for step in steps if step.name == run.pending.name]):
            steps = same
        problem = str(run.error).splitlines()[0][:120] if run.error else "other operators run"
        reason = f"{where or 'the model'} fails at the smaller size: {problem}"
        moves = next((count for count, step in enumerate(reversed(run.steps)) if not step.is_move), len(run.steps))
        return self._failure(position, where, reason, steps, moves)

    def _failure(self, position: int, where: str, reason: str, steps: Sequence[Step], moves: int = 0) -> Failure:
        found = [labels for step in steps for labels in step.labels()]
        roots = self.sets.roots(torch.cat(found)).unique().tolist() if found else []
        real = frozenset(label for label in roots if label > FIXED)
        return Failure((position, moves), where, reason, real, tuple(steps))

    def _first_wrong_value(self, dead: Sequence[Unit], rules: Sequence[SizeRule], gone: set[int]) -> Failure:
        """The first operator whose surviving values differ."""
        alive = self._alive(gone)
        kept = [[_survivors(axes, alive) for axes in step.outputs] for step in self.steps if not step.is_move]
        masked = watch(self.masked(dead), self.call, values=kept)
        shrunk = watch(self.shrunk(self.plan(dead, rules)), self.call, values=[])
        steps = [step for step in self.steps if not step.is_move]
        for position, (one, other) in enumerate(zip(masked.digests, shrunk.digests, strict=False)):
            if not _same_digest(one, other):
                step = steps[position]
                reason = f"{step.name} in {step.where or 'the model'} gives other values without them"
                return self._failure(position, step.where, reason, [step])
        return Failure((len(steps), 0), "", "the outputs of the model differ without them", frozenset(gone))


def _count(labels: Tensor | None, size: int, alive: Tensor) -> int | None:
    if labels is None:
        return size
    return None if bool((labels < FIXED).any()) else int(alive[labels].sum())


def _survivors(axes: tuple[Tensor | None, ...], alive: Tensor) -> dict[int, Tensor]:
    found = {}
    for dim, labels in enumerate(axes):
        if labels is None or bool((labels < FIXED).any()):
            continue
        stays = alive[labels]
        if not bool(stays.all()):
            found[dim] = stays.nonzero().flatten()
    return found


def mask_units(model: nn.Module, units: Iterable[Unit]) -> None:
    """Put zeros into every parameter of the units, in place."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for (tensor, dim), places in positions_of(units).items():
            if tensor in parameters:
                parameters[tensor].index_fill_(dim, torch.tensor(places, device=parameters[tensor].device), 0)


def _same_digest(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> bool:
    return len(one) == len(other) and all(
        abs(a - b) <= 1e-6 * max(size, other_size, 1e-30) for (a, size), (b, other_size) in zip(one, other, strict=True)
    )


def _agrees(masked: Sequence[Tensor], shrunk: Sequence[Tensor], dense: Sequence[Tensor]) -> bool:
    """Equal to 1e-5 of the largest value, and far nearer than the masked model is to the dense one."""
    if len(masked) != len(shrunk):
        return False
    for one, other, whole in zip(masked, shrunk, dense, strict=True):
        if one.shape != other.shape:
            return False
        if not one.is_floating_point():
            if not torch.equal(one, other):
                return False
            continue
        if not one.numel():
            continue
        if not bool(torch.isfinite(one).all()):
            return False
        error, scale = float((one - other).abs().max()), float(one.abs().max())
        effect = float((one - whole).abs().max())
        # Where removing has a small effect, an error of its size would hide below the tolerance.
        if error > TOLERANCE * scale or (error > 1e-3 * effect and error > 1e-7 * scale):
            return False
    return True


def _fits(wanted: Sequence[Sequence[int | None]], found: Sequence[Sequence[int]]) -> bool:
    return len(wanted) == len(found) and all(
        len(one) == len(other) and all(a is None or a == b for a, b in zip(one, other, strict=True))
        for one, other in zip(wanted, found, strict=True)
    )


def _shown(shapes: Sequence[Sequence[int | None]]) -> str:
    return ", ".join("x".join("?" if size is None else str(size) for size in shape) for shape in shapes)


def drawn(groups: Iterable[Group], share: float, generator: torch.Generator, spread: float = 0.0) -> list[Unit]:
    """Some units of every group, at random; every axis keeps one at least.

    `spread`: how far the share of each group may be from `share`: with one share for all, widths keep their ratios, and
    code that relies on a ratio (the width of a head is `embed_dim // num_heads`) would pass.
    """
    dead: list[Unit] = []
    for group in groups:
        own = share + spread * (2 * float(torch.rand((), generator=generator)) - 1)
        count = min(max(1, round(own * len(group.units))), len(group.units) - 1)
        order = torch.randperm(len(group.units), generator=generator)[:count].tolist()
        dead += keeping_axes([group.units[index] for index in order], group)
    return dead


def keeping_axes(dead: Sequence[Unit], group: Group) -> list[Unit]:
    """The units without those whose removal would empty an axis."""
    alive: dict[tuple[str, int], int] = {}
    for unit in group.units:
        for tensor, dim, _ in unit.members:
            alive[tensor, dim] = alive.get((tensor, dim), 0) + 1
    chosen = []
    for unit in dead:
        axes = {(tensor, dim) for tensor, dim, _ in unit.members}
        if all(alive[axis] > 1 for axis in axes):
            chosen.append(unit)
            for axis in axes:
                alive[axis] -= 1
    return chosen


def probe_copy(model: nn.Module) -> nn.Module:
    """A copy in which nothing hides an error: constant parameters (fresh norms, layer scales) get random values."""
    copied = copy_model(model).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in named_tensors(copied).values():
            if not tensor.is_floating_point() or not tensor.numel():
                continue
            flat = tensor.flatten()
            if bool((flat == flat[0]).all()):
                values = torch.rand(tensor.shape, generator=generator).to(tensor)
                is_center = float(flat[0]) == 0
                tensor.copy_((values - 0.5) * 0.2 if is_center else values + 0.5)
    return copied


def find_repairs(
    bench: Bench, failure: Failure, dead: Sequence[Unit], rules: Sequence[SizeRule]
) -> list[list[SizeRule]]:
    """Sets of attributes, most likely first, whose change could carry the run over a failure."""
    gone = {unit.label for unit in dead}
    options: list[list[SizeRule]] = []
    paths = [failure.where]
    while paths[-1]:
        paths.append(paths[-1].rpartition(".")[0])
    for path in paths:
        single: dict[tuple[str, int | None], list[SizeRule]] = {}
        module = bench.model.get_submodule(path)
        known = {(rule.module, rule.attribute, rule.item) for rule in rules}
        sizes = _changed_sizes(bench, [step for step in bench.steps if step.where == path], gone)
        if path != failure.where:
            inner = _changed_sizes(bench, [step for step in bench.steps if step.where == failure.where], gone)
            for size, entries in inner.items():
                sizes.setdefault(size, []).extend((labels, None) for labels, _ in entries)
        for name, item, value in _numbers(module):
            for labels, source in sizes.get(value, ()):
                if (path, name, item) not in known:
                    single.setdefault((name, item), []).append(SizeRule(path, name, item, labels, source))
        if single:
            firsts = [candidates[0] for candidates in single.values()]
            options.append(firsts)
            if len(firsts) > 1:
                options += [[rule] for rule in firsts]
                options += [list(pair) for pair in itertools.combinations(firsts, 2)][:6]
            options += [[rule] for candidates in single.values() for rule in _distinct(bench, candidates)[1:3]]
    return [everywhere(bench, option, gone) for option in options[:16]]


def _distinct(bench: Bench, rules: Iterable[SizeRule]) -> list[SizeRule]:
    """Rules without those that count the same units."""
    return list({tuple(bench.sets.find(x) if x > FIXED else x for x in rule.labels): rule for rule in rules}.values())


def everywhere(bench: Bench, option: Sequence[SizeRule], gone: set[int]) -> list[SizeRule]:
    """The same rules for all modules of the same class: what one attention needs, the others need too.

    Each gets its size from the same place of its own forward.
    """
    found: list[SizeRule] = []
    by_frame: dict[str, list[Step]] = {}
    for step in bench.steps:
        by_frame.setdefault(step.where, []).append(step)
    for rule in option:
        found.append(rule)
        kind = type(bench.model.get_submodule(rule.module))
        for path, module in bench.model.named_modules():
            if type(module) is not kind or path == rule.module or rule.source is None:
                continue
            value = getattr(module, rule.attribute, None)
            if rule.item is not None and isinstance(value, (tuple, list)) and rule.item < len(value):
                value = value[rule.item]
            entries = _changed_sizes(bench, by_frame.get(path, []), gone).get(value, []) if type(value) is int else []
            found += [
                SizeRule(path, rule.attribute, rule.item, labels, source)
                for labels, source in entries
                if source == rule.source
            ]
    return found


# Where in a forward a size was seen: the number of the step, the tensor, the dimension.
Source = tuple[int, int, int]
Sizes = dict[int, list[tuple[tuple[int, ...], Source | None]]]


def _changed_sizes(bench: Bench, steps: Iterable[Step], gone: set[int]) -> Sizes:
    """The sizes of dimensions that shrink in these steps: size -> the labels of such dimensions, and their places."""
    found: Sizes = {}
    for number, step in enumerate(steps):
        tensors = [*step.outputs, *(axes for _, axes in step.inputs)]
        tensors += [] if step.groups is None else [(step.groups,)]
        for place, axes in enumerate(tensors):
            for dim, labels in enumerate(axes):
                if labels is None:
                    continue
                listed = tuple(labels.tolist())
                if any(label > FIXED and bench.sets.find(label) in gone for label in listed):
                    found.setdefault(len(listed), []).append((listed, (number, place, dim)))
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


def double_precision(model: nn.Module, call: Call) -> tuple[nn.Module, Call]:
    """Model and call in float64, where errors of rounding do not hide others."""
    args, kwargs = map_nested(Tensor, lambda x: x.double() if x.is_floating_point() else x, call)
    return copy_model(model).double(), (args, kwargs)
