"""`BranchRuns`: runs of a model through its branches: those that scenes take, then those that are forced."""

from __future__ import annotations

import ast
import bisect
import contextlib
import dis
import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from sparsebit.graph.values.copying import copy_model
from sparsebit.sparse.channels.labels import FIXED, Axes, LabelSets
from sparsebit.sparse.channels.trace import axes_of, watch
from sparsebit.sparse.proof.code_forks import FORK, Arm, Fork, ForkedFunction, forked
from sparsebit.sparse.proof.no_side_effects import writes
from sparsebit.sparse.proof.scenes import Atom, Scene
from sparsebit.sparse.proof.width_numbers import is_library
from sparsebit.sparse.proof.width_reads import may_count, size_variables
from sparsebit.sparse.shrinking.surgery import named_tensors

_MOST_FORCED = 16  # branches; each is a few runs
# For each dimension of a tensor: the atom at each of its positions; None: positions that stay.
Atoms = tuple[tuple[Atom | None, ...] | None, ...]


@dataclass(frozen=True)
class Branch:
    """A branch of a function: the fork, and the truth value that leads to it."""

    function: ForkedFunction
    fork: Fork
    arm: Arm

    @property
    def code(self) -> tuple[ast.AST, ...]:
        return self.fork.arms[self.arm.value]

    def __str__(self) -> str:
        place = f"{os.path.basename(self.function.original.co_filename)}:{self.fork.line}"
        if self.fork.is_block:
            return f"{self.fork.text} ({place})"
        return f"{'if' if self.arm.value else 'if not'} {_short(self.fork.text)} ({place})"


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


class BranchRuns:
    """Visits scenes. When a run first reaches a fork, the arm that it did not take is queued to be forced."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        kinds = {kind for module in model.modules() for kind in type(module).__mro__}
        self.methods = {innermost(value) for kind in kinds for value in vars(kind).values()}
        children = {name for module in model.modules() for name, _ in module.named_children()}
        self.names = children | {one.__name__ for one in self.methods if one is not None}
        self.functions: list[ForkedFunction] = []
        self.codes: set[CodeType] = set()
        self.unread: set[str] = set()
        forwards = (one for one in self.methods if one is not None and one.__name__ == "forward")
        self._add({one.__code__: one for one in forwards if not is_library(one.__code__.co_filename)})
        self.taken: set[Arm] = set()
        self.called: set[str] = set()
        self.asked: set[tuple[int, int]] = set()
        self.waiting: deque[tuple[Branch, Scene]] = deque()
        self.forced: list[Scene] = []
        self.shapes: tuple[tuple[int, ...], ...] = ()  # of the outputs for the example
        # The values of the variables in a function's frame at a fork: tensors with labels.
        self.held: dict[tuple[int, int], dict[str, tuple[LabelSets, Axes]]] = {}
        self.carrying: set[int] = set()

    def visit(self, scene: Scene) -> None:
        """Run the scene, and record its arms; records nothing if the model does not run.

        The run is repeated until it calls no new function: functions are found by running them, and their forks are
        recorded only in the next run.
        """
        num_known = len(self.functions)
        while True:
            called: dict[CodeType, FunctionType | None] = {}
            with _calls_to(called):
                found = replace(scene, functions=tuple(self.functions)).trial(self.model)
            if not self._add(called):
                break
        if found is None:
            return
        is_first = not self.shapes
        self.shapes = self.shapes or found.shapes
        # Labels are needed for what new functions hold, and for channels that a branch returns.
        is_new = is_first or num_known < len(self.functions) or (scene.arms and found.shapes != self.shapes)
        outputs = self._label(scene) if is_new else ()
        if scene.arms:
            self.forced.append(replace(scene, output_atoms=outputs))
        for arm in found.taken:
            if (arm.function, arm.fork) not in self.asked:
                self.asked.add((arm.function, arm.fork))
                self.waiting.append((self._branch(replace(arm, value=not arm.value)), scene))
        self.taken |= found.taken
        self.called |= found.called

    def _label(self, scene: Scene) -> tuple[Atoms, ...]:
        """Run the scene with labels: what variables hold at forks, and what the outputs show of channels."""
        sets, model = LabelSets(), copy_model(self.model, share_parameters=not scene.arms)
        names = {id(tensor): name for name, tensor in named_tensors(model).items()}

        def observe(function: int, fork: int, frame: FrameType) -> None:
            held = self.held.setdefault((function, fork), {})
            for name, value in frame.f_locals.items():
                if name not in held and issubclass(type(value), Tensor):  # `isinstance` may call instrumented code
                    axes = axes_of(value, sets)
                    if any(labels is not None for labels in axes):
                        held[name] = sets, axes
                        self.carrying.add(function)

        with replace(scene, functions=tuple(self.functions)).entered(model, observe):
            run = watch(model, scene.call, sets, names)
        return tuple(atoms_of(sets, axes_of(output, sets)) for output in run.outputs)

    def _add(self, called: Mapping[CodeType, FunctionType | None]) -> bool:
        """Add the functions of these codes that are new."""
        whole = {code: one for code, one in called.items() if not code.co_name.endswith(("comp>", "genexpr>"))}
        new = {code: function for code, function in whole.items() if code not in self.codes}
        self.codes |= new.keys()
        added = []
        for code, function in new.items():
            found = None if function is None else forked(function)
            if found is not None and found.forks:
                added.append(found)
            elif found is None and _has_branches(code) and (function is None or function in self.methods):
                self.unread.add(code.co_qualname)
        self.functions += added
        self.codes |= {function.code for function in added}
        return bool(added)

    def _branch(self, arm: Arm) -> Branch:
        function = next(function for function in self.functions if function.number == arm.function)
        return Branch(function, function.forks[arm.fork], arm)

    def force(self) -> None:
        """Run the waiting arms, each together with those of the scene that led to it."""
        # Runs are limited as well as scenes: a branch that fails becomes no scene, but its run took time.
        num_runs = 0
        while self.waiting and num_runs < 2 * _MOST_FORCED and len(self.forced) < _MOST_FORCED:
            branch, scene = self.waiting.popleft()
            code = branch.code or (branch.function.tree,)  # without an `else`, what follows has the values of before
            cannot = branch.fork.is_block or (branch.fork.num_options and not branch.arm.value)
            if branch.arm in self.taken or cannot or not self._matters(branch, code):
                continue
            if not writes(branch.code):
                num_runs += 1
                self.visit(replace(scene, name=f"where {branch}", arms=scene.arms | {branch.arm}))

    def unrun(self) -> Iterator[Branch]:
        """The branches with code that no run took."""
        for function in self.functions:
            for arm in function.arms():
                branch = self._branch(arm)
                if arm not in self.taken and branch.code and self._matters(branch, branch.code):
                    yield branch

    def _matters(self, branch: Branch, code: tuple[ast.AST, ...]) -> bool:
        """Whether a branch may count channels: in a method of a module by any call, elsewhere by itself."""
        # A branch that raises returns nothing that could differ.
        if any(isinstance(node, ast.Raise) for node in branch.code):
            return False
        function = branch.function.function
        if function not in self.methods and branch.function.number not in self.carrying:
            return False
        sizes = size_variables(branch.function.tree)
        named = {name for name, value in function.__globals__.items() if isinstance(value, FunctionType)}
        return may_count(code, sizes, self.names | named)


def innermost(value: Any) -> FunctionType | None:
    """The function inside a method, a property or decorators that name what they wrap."""
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    while isinstance(value, FunctionType) and "__wrapped__" in vars(value):
        value = vars(value)["__wrapped__"]
    return value if isinstance(value, FunctionType) else None


def atoms_of(sets: LabelSets, axes: Axes) -> Atoms:
    """Labels as positions of parameters and buffers."""
    firsts = [axis.first for axis in sets.axes]

    def home(label: int) -> Atom | None:
        if label <= FIXED:
            return None
        axis = sets.axes[bisect.bisect_right(firsts, label) - 1]
        return axis.tensor, axis.dim, label - axis.first

    found = (None if labels is None else tuple(home(label) for label in labels.tolist()) for labels in axes)
    return tuple(atoms if atoms and any(atoms) else None for atoms in found)


def _has_branches(code: CodeType) -> bool:
    return any("JUMP" in one.opname and "IF" in one.opname for one in dis.get_instructions(code))


@contextlib.contextmanager
def _calls_to(called: dict[CodeType, FunctionType | None]) -> Iterator[None]:
    """Collect the functions that are called, by their code; none while another profiler runs."""
    if sys.getprofile() is not None:
        yield
        return

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code not in called and not is_library(code.co_filename) and FORK not in code.co_names:
            called[code] = _function_of(frame)

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def _function_of(frame: FrameType) -> FunctionType | None:
    """The function that runs in a frame: a global one, a method of its first argument, or what the caller calls."""
    code = frame.f_code
    candidates = [frame.f_globals.get(code.co_name)]
    if code.co_argcount:
        first = frame.f_locals.get(code.co_varnames[0])
        kinds = (*type(first).__mro__, *(first.__mro__ if isinstance(first, type) else ()))
        candidates += [vars(kind).get(code.co_name) for kind in kinds]
        candidates += [one for kind in kinds for one in vars(kind).values()] if first is not None else []
    if frame.f_back is not None:
        candidates += frame.f_back.f_locals.values()
    found = map(innermost, candidates)
    return next((one for one in found if one is not None and one.__code__ is code), None)
