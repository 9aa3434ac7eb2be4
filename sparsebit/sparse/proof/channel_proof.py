"""Proof of channel groups: the shrunk model must compute the same as the masked model.

Units are drawn at random. In one copy of the model all their parameters become zero, in another they are removed. Both
run; the sizes that every operator of the smaller one returns are compared with the sizes that the labels predict, so
that a failure names the operator, the module and the groups that meet there. Attributes of the user's modules that hold
a size (`num_heads`) are changed if the run then gets further (`size_repairs.py`). Groups that still fail are spared.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sparsebit.execution.batches import Call
from sparsebit.graph.values.copying import copy_model
from sparsebit.sparse.channels.groups import Group, Unit, kept_positions, positions_of
from sparsebit.sparse.channels.labels import FIXED, LabelSets
from sparsebit.sparse.channels.trace import ModulePaths, Trace, TracedCall, outputs_of, watch
from sparsebit.sparse.channels.wide_groups import WideGroups
from sparsebit.sparse.proof.scenes import Scene
from sparsebit.sparse.proof.width_numbers import NumbersOfSizes
from sparsebit.sparse.shrinking.surgery import Attribute, ChannelPlan, apply_plan, named_tensors

TOLERANCE = 1e-5
# Operators whose values are undefined or random.
_UNDEFINED = frozenset((
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "rand", "randn",
    "rand_like", "randn_like", "bernoulli", "bernoulli_", "normal_", "uniform_",
))  # fmt: skip
# A linear layer runs one of these, by the strides of its input; `mm` and `bmm` are then followed by an `add`.
_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm"))


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
    """Why a shrunk model differs from the masked one: where the difference shows, and which labels meet there."""

    # How far the run came: the number of operators that compute, then of those that move values.
    position: tuple[int, int]
    where: str
    reason: str
    labels: frozenset[int]
    steps: tuple[TracedCall, ...] = ()
    # Where the example agrees and another scene does not.
    scene: Scene | None = None


class Computed(NamedTuple):
    """A step that computes: where it is among all steps, and among those that compute."""

    step: int
    number: int
    name: str


class Bench:
    """A model, an example call and the labels of one traced run: the inputs of every proof."""

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        trace: Trace,
        sets: LabelSets,
        computed: Mapping[str, str],
        wide: WideGroups | None = None,
        scenes: Sequence[Scene] = (),
    ) -> None:
        self.wide, self.scenes = wide or WideGroups(), scenes
        self.model, self.call, self.sets, self.steps = model, call, sets, trace.steps
        self.computed = computed  # convolutions whose weights are computed once, when channels go
        self.dense_outputs = trace.outputs
        self.sizes = {name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()}

    def plan(self, dead: Sequence[Unit], rules: Iterable[SizeRule]) -> ChannelPlan:
        """The plan that removes these units."""
        alive = self.alive({unit.label for unit in dead})
        wide = [self.wide.leaving(unit) for unit in dead if unit.label in self.wide.reasons]
        kept = kept_positions([unit for unit in dead if unit.label not in self.wide.reasons], self.sizes)
        spread: dict[str, tuple[str, ...]] = {}
        for tensor, dims in kept_positions(wide, self.sizes).items():
            kept.setdefault(tensor, {}).update(dims)
            path, _, own = tensor.rpartition(".")
            if own == "weight":
                spread[path] = tuple("out" if dim == 0 else "in" for dim in sorted(dims))
        attributes: dict[str, dict[str, Attribute]] = {}
        # Rules of one tuple attribute each change one item of the value that the rules before them have left.
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
            computed=self.computed if kept else {},
            spread=spread,
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

    def alive(self, gone: set[int]) -> Tensor:
        """For every label: whether activations keep it. Wide groups leave layers only, so activations keep them."""
        is_alive = torch.ones(len(self.sets), dtype=torch.bool)
        is_alive[torch.tensor(sorted(gone - self.wide.reasons.keys()), dtype=torch.long)] = False
        return is_alive[self.sets.roots()]

    def expected(self, step: TracedCall, alive: Tensor) -> tuple[tuple[int | None, ...], ...]:
        """The sizes of a step's outputs after the removal; None: not known."""
        return tuple(
            tuple(_count(labels, size, alive) for labels, size in zip(axes, shape, strict=True))
            for axes, shape in zip(step.outputs, step.shapes, strict=True)
        )

    def masked(self, dead: Sequence[Unit]) -> nn.Module:
        """A copy with zeros in every parameter of the units; buffers stay."""
        touched = {tensor for tensor, _ in positions_of(dead)}
        others = [parameter for name, parameter in self.model.named_parameters() if name not in touched]
        copied = copy_model(self.model, share=others)
        mask_units(copied, dead)
        return copied

    def shrunk(self, dead: Sequence[Unit], rules: Iterable[SizeRule]) -> nn.Module:
        plan = self.plan(dead, rules)
        # A computed weight mixes input channels (a mean over them). To equal the masked model's, it has to be computed
        # from the masked parameters, before channels are removed.
        copied = self.masked(dead) if self.computed else copy_model(self.model, share_parameters=True)
        apply_plan(copied, plan)
        return copied

    def compare(self, dead: Sequence[Unit], rules: Sequence[SizeRule]) -> Failure | None:
        """None if the shrunk model equals the masked one on the example and in all scenes."""
        if not dead:
            return None  # nothing is removed
        failure = self._compare_on_example(dead, rules)
        for number, scene in enumerate(self.scenes):
            failure = failure or self.compare_in(scene, dead, rules, number)
        return failure

    def compare_in(
        self, scene: Scene, dead: Sequence[Unit], rules: Sequence[SizeRule], number: int = 0
    ) -> Failure | None:
        """None if the outputs of the shrunk model equal those of the masked one in a scene."""
        masked_model, shrunk = self.masked(dead), self.shrunk(dead, rules)
        with NumbersOfSizes(masked_model) as numbers:
            masked = scene.outputs(masked_model)
        paths, where = ModulePaths(shrunk), ""
        try:
            with paths.watched(), NumbersOfSizes(shrunk) as smaller:
                found = scene.outputs(shrunk)
        except Exception as error:
            where = paths.failed_in
            problem = f"{where or 'the model'} fails at the smaller size: {_first_line(error)}"
        else:
            place = smaller.differs_from(numbers)
            if _agrees_in(scene, masked, found, positions_of(dead)) and place is None:
                return None
            problem = "the model returns other values without them" if place is None else _computing_with(place)
        # Later than every position on the example, so that a repair that gets the run this far counts as progress.
        position = len(computing(self.steps)) + 1 + number
        return Failure((position, 0), where, f"{scene.name} {problem}", frozenset(), scene=scene)

    def _compare_on_example(self, dead: Sequence[Unit], rules: Sequence[SizeRule]) -> Failure | None:
        gone = {unit.label for unit in dead}
        masked, shrunk = self.masked(dead), self.shrunk(dead, rules)
        with NumbersOfSizes(shrunk) as smaller:
            run = watch(shrunk, self.call)
        if not gone.isdisjoint(self.wide.reasons):  # these layers run other operators than the masked ones
            problem = _first_line(run.error) if run.error else "the outputs of the model differ"
            is_same = run.error is None and _agrees(outputs_of(masked, self.call), run.outputs, self.dense_outputs)
            return None if is_same else Failure((0, 0), run.failed_in or "", problem, frozenset(gone))
        if failure := self._first_difference(run, gone):
            return failure
        with NumbersOfSizes(masked) as numbers:
            is_masked = _agrees(outputs_of(masked, self.call), run.outputs, self.dense_outputs)
        place = smaller.differs_from(numbers)
        if is_masked and place is None:
            return None
        text = "the outputs of the model differ without them" if place is None else _computing_with(place)
        # Different outputs do not show the place. Two more runs find the first operator that differs.
        wrong = self.first_wrong_value(dead, rules)
        return wrong or Failure((len(computing(self.steps)), 0), "", text, frozenset(gone))

    def _first_difference(self, run: Trace, gone: set[int]) -> Failure | None:
        expected, actual = computing(self.steps), computing(run.steps)
        previous, alive = 0, self.alive(gone)
        for position, (planned, seen) in enumerate(zip(expected, actual, strict=False)):
            step, found = self.steps[planned.step], run.steps[seen.step]
            wanted = self.expected(step, alive)
            is_same = planned.name == seen.name and _fits(wanted, found.shapes)
            if not is_same and step.where == found.where and {planned.name, seen.name} <= _PRODUCTS:
                # Strides choose among them (one channel that is left is contiguous), and how dimensions are folded.
                is_same = _numel(wanted) in (None, _numel(found.shapes))
            if not is_same:
                shapes = f"{_shown(found.shapes)}, not {_shown(wanted)}"
                reason = f"{found.name} in {found.where or 'the model'} returns {shapes}"
                return self._failure(position, found.where, reason, self.steps[previous : planned.step + 1])
            previous = planned.step + 1
        if run.error is None and len(expected) == len(actual):
            return None
        position = min(len(expected), len(actual))
        last = expected[position].step if position < len(expected) else len(self.steps) - 1
        where = run.pending.where if run.pending else run.failed_in
        if where is None:
            where = self.steps[last].where if self.steps else ""
        steps = self.steps[previous : last + 1]
        if run.pending and (same := [step for step in steps if step.name == run.pending.name]):
            steps = same
        problem = _first_line(run.error) if run.error else "other operators run"
        reason = f"{where or 'the model'} fails at the smaller size: {problem}"
        # Views since the last operator that computes: a repair may get the run past one view and fail at the next.
        moves = next((count for count, step in enumerate(reversed(run.steps)) if not step.is_move), len(run.steps))
        return self._failure(position, where, reason, steps, moves)

    def _failure(self, position: int, where: str, reason: str, steps: Sequence[TracedCall], moves: int = 0) -> Failure:
        found = [labels for step in steps for labels in step.labels()]
        roots = self.sets.roots(torch.cat(found)).unique().tolist() if found else []
        real = frozenset(label for label in roots if label > FIXED)
        return Failure((position, moves), where, reason, real, tuple(steps))

    def first_wrong_value(self, dead: Sequence[Unit], rules: Sequence[SizeRule]) -> Failure | None:
        """The first operator whose surviving values differ. It may be one whose result the example does not select."""
        alive = self.alive({unit.label for unit in dead})
        kept = [[_survivors(axes, alive) for axes in step.outputs] for step in self.steps if not step.is_move]
        masked = watch(self.masked(dead), self.call, values=kept)
        shrunk = watch(self.shrunk(dead, rules), self.call, values=[])
        expected, actual = computing(self.steps), computing(shrunk.steps)
        for position, (planned, seen) in enumerate(zip(expected, actual, strict=False)):
            step = self.steps[planned.step]
            if step.is_free or step.name in _UNDEFINED or planned.number not in masked.used:
                continue
            if not _same_digest(masked.digests[planned.number], shrunk.digests[seen.number]):
                reason = f"{step.name} in {step.where or 'the model'} returns other values without them"
                return self._failure(position, step.where, reason, [step])
        return None


def _computing_with(place: str) -> str:
    return f"the model computes with their number ({place})"


def _first_line(error: BaseException) -> str:
    """The first line of an error; an assertion in the user's code may have no text."""
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


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


def computing(steps: Sequence[TracedCall]) -> list[Computed]:
    """The steps that compute. A product and the `add` of a bias right after it are one, as in `addmm`."""
    found: list[Computed] = []
    number = 0
    for index, step in enumerate(steps):
        if step.is_move:
            continue
        before = found[-1] if found else None
        is_bias = before is not None and before.name in ("mm", "bmm") and steps[before.step].where == step.where
        if before is not None and step.name == "add" and is_bias:
            found[-1] = Computed(index, number, "addmm")
        else:
            found.append(Computed(index, number, step.name))
        number += 1
    return found


def _numel(shapes: Sequence[Sequence[int | None]]) -> int | None:
    """The number of elements of several tensors; None: not known."""
    total = 0
    for shape in shapes:
        if any(size is None for size in shape):
            return None
        total += math.prod(size for size in shape if size is not None)
    return total


def _same_digest(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> bool:
    return len(one) == len(other) and all(
        not math.isfinite(size + other_size) or abs(a - b) <= 1e-6 * max(size, other_size, 1e-30)  # of masks with -inf
        for (a, size), (b, other_size) in zip(one, other, strict=True)
    )


@torch.no_grad()  # outputs may be views that the model has written into
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
        # Where the removal has a small effect, an error of the same size would be below the tolerance.
        if error > TOLERANCE * scale or (error > 1e-3 * effect and error > 1e-7 * scale):
            return False
    return True


@torch.no_grad()
def _agrees_in(
    scene: Scene, masked: Sequence[Tensor], shrunk: Sequence[Tensor], gone: Mapping[tuple[str, int], Sequence[int]]
) -> bool:
    """Equal outputs; channels that only a forced branch returns are compared where they are left."""
    if len(masked) != len(shrunk):
        return False
    for one, other, axes in itertools.zip_longest(masked, shrunk, scene.output_atoms[: len(masked)]):
        for dim, atoms in enumerate(axes or ()):
            if atoms is not None and len(atoms) == one.shape[dim]:
                places = [i for i, atom in enumerate(atoms) if atom is None or atom[2] not in gone.get(atom[:2], ())]
                one = one.index_select(dim, torch.tensor(places, dtype=torch.long))
        if one.shape != other.shape:
            return False
        tolerance = 1e-7 if one.dtype == torch.float64 else 1e-4
        is_equal = torch.allclose if one.is_floating_point() else lambda a, b, **_: torch.equal(a, b)
        scale = float(one.abs().max()) if one.is_floating_point() and one.numel() else 0.0
        if not is_equal(one, other, rtol=0.0, atol=tolerance * scale + 1e-30):
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
