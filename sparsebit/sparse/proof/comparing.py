"""Whether the shrunk model computes the same as the masked one: on the example, in scenes, and operator by operator.

In one copy of the model the parameters of all removed units are zero, in another they are gone. Both run; the sizes
that every operator of the smaller one returns are compared with the sizes that the labels predict, so that a `Failure`
names the operator, the module and the groups that meet there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sparsebit.sparse.channels.groups import Unit, positions_of
from sparsebit.sparse.channels.labels import FIXED
from sparsebit.sparse.channels.trace import ModulePaths, Trace, TracedCall, outputs_of, watch
from sparsebit.sparse.proof.bench import Bench
from sparsebit.sparse.proof.scenes import Scene
from sparsebit.sparse.proof.width_numbers import NumbersOfSizes

# Operators whose values are undefined or random.
_UNDEFINED = frozenset((
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "rand", "randn",
    "rand_like", "randn_like", "bernoulli", "bernoulli_", "normal_", "uniform_",
))  # fmt: skip
# A linear layer runs one of these, by the strides of its input; `mm` and `bmm` are then followed by an `add`.
_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm"))


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


def compare(bench: Bench, dead: Sequence[Unit]) -> Failure | None:
    """None if the shrunk model equals the masked one on the example and in all scenes."""
    if not dead:
        return None  # nothing is removed
    failure = _compare_on_example(bench, dead)
    for number, scene in enumerate(bench.scenes):
        failure = failure or compare_in(scene, bench, dead, number)
    return failure


def compare_in(scene: Scene, bench: Bench, dead: Sequence[Unit], number: int = 0) -> Failure | None:
    """None if the outputs of the shrunk model equal those of the masked one in a scene."""
    masked_model, shrunk = bench.masked(dead), bench.shrunk(dead)
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
        if place is None and _agrees_in(scene, masked, found, positions_of(dead)):
            return None
        problem = "the model returns other values without them" if place is None else _computing_with(place)
    # Later than every position on the example, so that a repair that gets the run this far counts as progress.
    position = len(computing(bench.steps)) + 1 + number
    return Failure((position, 0), where, f"{scene.name} {problem}", frozenset(), scene=scene)


def first_wrong_value(bench: Bench, dead: Sequence[Unit]) -> Failure | None:
    """The first operator whose surviving values differ. It may be one whose result the example does not select."""
    alive = bench.alive({unit.label for unit in dead})
    kept = [[_survivors(axes, alive) for axes in step.outputs] for step in bench.steps if not step.is_move]
    masked = watch(bench.masked(dead), bench.call, values=kept)
    shrunk = watch(bench.shrunk(dead), bench.call, values=[])
    expected, actual = computing(bench.steps), computing(shrunk.steps)
    for position, (planned, seen) in enumerate(zip(expected, actual, strict=False)):
        step = bench.steps[planned.step]
        if step.is_free or step.name in _UNDEFINED or planned.number not in masked.used:
            continue
        if not _same_digest(masked.digests[planned.number], shrunk.digests[seen.number]):
            reason = f"{step.name} in {step.where or 'the model'} returns other values without them"
            return _failure(bench, position, step.where, reason, [step])
    return None


def _compare_on_example(bench: Bench, dead: Sequence[Unit]) -> Failure | None:
    gone = {unit.label for unit in dead}
    masked, shrunk = bench.masked(dead), bench.shrunk(dead)
    with NumbersOfSizes(shrunk) as smaller:
        run = watch(shrunk, bench.call)
    if not gone.isdisjoint(bench.wide.reasons):  # these layers run other operators than the masked ones
        problem = _first_line(run.error) if run.error else "the outputs of the model differ"
        is_same = run.error is None and _agrees(outputs_of(masked, bench.call), run.outputs, bench.trace.outputs)
        return None if is_same else Failure((0, 0), run.failed_in or "", problem, frozenset(gone))
    if failure := _first_difference(bench, run, gone):
        return failure
    with NumbersOfSizes(masked) as numbers:
        is_masked = _agrees(outputs_of(masked, bench.call), run.outputs, bench.trace.outputs)
    place = smaller.differs_from(numbers)
    if is_masked and place is None:
        return None
    text = "the outputs of the model differ without them" if place is None else _computing_with(place)
    # Different outputs do not show the place. Two more runs find the first operator that differs.
    wrong = first_wrong_value(bench, dead)
    return wrong or Failure((len(computing(bench.steps)), 0), "", text, frozenset(gone))


def _first_difference(bench: Bench, run: Trace, gone: set[int]) -> Failure | None:
    expected, actual = computing(bench.steps), computing(run.steps)
    previous, alive = 0, bench.alive(gone)
    for position, (planned, seen) in enumerate(zip(expected, actual, strict=False)):
        step, found = bench.steps[planned.step], run.steps[seen.step]
        wanted = bench.expected(step, alive)
        is_same = planned.name == seen.name and _fits(wanted, found.shapes)
        if not is_same and step.where == found.where and {planned.name, seen.name} <= _PRODUCTS:
            # Strides choose among them (one channel that is left is contiguous), and how dimensions are folded.
            is_same = _numel(wanted) in (None, _numel(found.shapes))
        if not is_same:
            shapes = f"{_shown(found.shapes)}, not {_shown(wanted)}"
            reason = f"{found.name} in {found.where or 'the model'} returns {shapes}"
            return _failure(bench, position, found.where, reason, bench.steps[previous : planned.step + 1])
        previous = planned.step + 1
    if run.error is None and len(expected) == len(actual):
        return None
    position = min(len(expected), len(actual))
    last = expected[position].step if position < len(expected) else len(bench.steps) - 1
    where = run.pending.where if run.pending else run.failed_in
    if where is None:
        where = bench.steps[last].where if bench.steps else ""
    steps = bench.steps[previous : last + 1]
    if run.pending and (same := [step for step in steps if step.name == run.pending.name]):
        steps = same
    problem = _first_line(run.error) if run.error else "other operators run"
    reason = f"{where or 'the model'} fails at the smaller size: {problem}"
    # Views since the last operator that computes: a repair may get the run past one view and fail at the next.
    moves = next((count for count, step in enumerate(reversed(run.steps)) if not step.is_move), len(run.steps))
    return _failure(bench, position, where, reason, steps, moves)


def _failure(
    bench: Bench, position: int, where: str, reason: str, steps: Sequence[TracedCall], moves: int = 0
) -> Failure:
    found = [labels for step in steps for labels in step.labels()]
    roots = bench.sets.roots(torch.cat(found)).unique().tolist() if found else []
    real = frozenset(label for label in roots if label > FIXED)
    return Failure((position, moves), where, reason, real, tuple(steps))


def _computing_with(place: str) -> str:
    return f"the model computes with their number ({place})"


def _first_line(error: BaseException) -> str:
    """The first line of an error; an assertion in the user's code may have no text."""
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


def _survivors(axes: tuple[Tensor | None, ...], alive: Tensor) -> dict[int, Tensor]:
    found = {}
    for dim, labels in enumerate(axes):
        if labels is None or bool((labels < FIXED).any()):
            continue
        stays = alive[labels]
        if not bool(stays.all()):
            found[dim] = stays.nonzero().flatten()
    return found


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
        scale, effect = _largest(one), _difference(one, whole)
        # Where the removal has a small effect, an error of the same size would be below the tolerance.
        if not _is_near(one, other, min(1e-5 * scale, max(1e-3 * effect, 1e-7 * scale))):
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
        tolerance = 1e-7 if one.dtype == torch.float64 else 1e-4
        if not _is_near(one, other, tolerance * _largest(one)):
            return False
    return True


def _is_near(one: Tensor, other: Tensor, limit: float) -> bool:
    error = _difference(one, other)
    return math.isfinite(error) and error <= limit


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.is_floating_point() and values.numel() else 0.0


def _difference(one: Tensor, other: Tensor) -> float:
    """The largest difference of two tensors; infinite where they cannot be subtracted and are not equal."""
    if one.shape != other.shape or not one.is_floating_point():
        return 0.0 if torch.equal(one, other) else math.inf
    return float((one - other).abs().max()) if one.numel() else 0.0


def _fits(wanted: Sequence[Sequence[int | None]], found: Sequence[Sequence[int]]) -> bool:
    return len(wanted) == len(found) and all(
        len(one) == len(other) and all(a is None or a == b for a, b in zip(one, other, strict=True))
        for one, other in zip(wanted, found, strict=True)
    )


def _shown(shapes: Sequence[Sequence[int | None]]) -> str:
    return ", ".join("x".join("?" if size is None else str(size) for size in shape) for shape in shapes)
