"""One run of a model in which every operator call carries the labels of channels from its inputs to its outputs.

The run is an ordinary forward of the user's own code, watched below autograd (`TorchDispatchMode`): branches, loops,
hooks, functions and parametrized weights are all seen as the operators that they call.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from sparsebit.execution.batches import Call as ModelCall
from sparsebit.graph.checking.outcome import cloned
from sparsebit.graph.state.hooks import hooked
from sparsebit.graph.state.state import tensors_inside
from sparsebit.graph.tracing.patched_torch import unfused_attention
from sparsebit.sparse.channels.labels import FIXED, Axes, LabelSets
from sparsebit.sparse.channels.moving_ops import MOVES
from sparsebit.sparse.channels.op_call import Call, tensor_leaves
from sparsebit.sparse.channels.returned import results_of
from sparsebit.sparse.channels.rules import carry

_ATTRIBUTE = "_sparsebit_axes"
_SOURCES = "_sparsebit_sources"  # the steps whose values a tensor holds
_PINS = "_sparsebit_pins"  # labels that must stay, or keep their places, if the tensor is used
# For each output of a step: dimension -> the positions that are compared.
Survivors = Sequence[Mapping[int, Tensor]]


@dataclass(frozen=True)
class TracedCall:
    """One operator call: its name, the module whose forward made it, and the labels of its inputs and outputs."""

    name: str
    where: str
    shapes: tuple[tuple[int, ...], ...]
    inputs: tuple[tuple[tuple[int, ...], Axes], ...] = ()
    outputs: tuple[Axes, ...] = ()
    groups: Tensor | None = None

    @property
    def is_move(self) -> bool:
        return self.name in MOVES

    @property
    def is_free(self) -> bool:
        """Whether a dimension of an output could have any size."""
        return any(labels is not None and bool((labels < FIXED).any()) for axes in self.outputs for labels in axes)

    def labels(self) -> list[Tensor]:
        every = [*(axes for _, axes in self.inputs), *self.outputs]
        return [labels for axes in every for labels in axes if labels is not None]


@dataclass(frozen=True)
class LabelChoice:
    """A place where labels can be carried in several ways. Calls of one class of modules choose alike."""

    key: str
    num_options: int
    labels: Tensor


@dataclass
class Trace:
    """The result of one run."""

    steps: list[TracedCall] = field(default_factory=list)
    choices: list[LabelChoice] = field(default_factory=list)
    error: BaseException | None = None
    # Where the run stopped: the operator that failed, its inputs' shapes, and the module.
    pending: TracedCall | None = None
    # The module whose own code failed, where no operator did.
    failed_in: str | None = None
    outputs: list[Tensor] = field(default_factory=list)
    # For every step that computes: two numbers that represent the values of each output.
    digests: list[list[tuple[float, float]]] = field(default_factory=list)
    # The numbers of those among them whose results are used or returned.
    used: set[int] = field(default_factory=set)


class ModulePaths:
    """Which module's forward is running, while the context is open."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.stack: list[tuple[str, nn.Module, dict[str, int]]] = [("", model, {})]
        self.failed_in = ""  # the innermost module that an exception left

    @property
    def path(self) -> str:
        return self.stack[-1][0]

    @property
    def module(self) -> nn.Module:
        return self.stack[-1][1]

    def number(self, kind: str) -> int:
        """How many times this kind was requested in the running call of the module."""
        counts = self.stack[-1][2]
        counts[kind] = counts.get(kind, -1) + 1
        return counts[kind]

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        names = {module: path for path, module in self.model.named_modules() if path}

        def enter(module: nn.Module, _: Any) -> None:
            if module in names:
                self.stack.append((names[module], module, {}))

        def leave(module: nn.Module, *_: Any) -> None:
            if module in names:
                self.stack.pop()
                if sys.exc_info()[1] is not None:
                    self.failed_in = self.failed_in or names[module]

        # Hooks of all modules: the model's code may ask for the hooks of one (`if self.layer._forward_hooks:`).
        handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
        try:
            with hooked(handles):
                yield
        finally:
            del self.stack[1:]


@dataclass(eq=False)
class _Watch(TorchDispatchMode):
    """Records steps; with `sets`, labels too."""

    paths: ModulePaths
    trace: Trace
    sets: LabelSets | None
    names: Mapping[int, str]
    options: Mapping[str, int]
    values: Sequence[Survivors] | None

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, where = str(op._schema.name).removeprefix("aten::"), self.paths.path
        try:
            result = op(*args, **kwargs)
        except Exception:
            self.trace.pending = TracedCall(name, where, _shapes(tensor_leaves((args, kwargs))))
            raise
        outputs = tensor_leaves(result)
        if self.values is not None:
            self._note_use(name, tensor_leaves((args, kwargs)), outputs)
        if self.values is not None and name not in MOVES:
            number = len(self.trace.digests)
            kept = self.values[number] if number < len(self.values) else [{} for _ in outputs]
            self.trace.digests.append([_digest(x, dims) for x, dims in zip(outputs, kept, strict=False)])
        if self.sets is None:
            self.trace.steps.append(TracedCall(name, where, _shapes(outputs)))
            return result
        call = Call(op, args, kwargs, outputs, where, self.axes_of, self.choose)
        enact_pins(self.sets, call.tensors())
        inputs = tuple((tuple(tensor.shape), self.axes_of(tensor)) for tensor in call.tensors())
        carried = tuple(carry(self.sets, call))
        # Labels are attributes of the tensor objects, so they pass through the user's containers, closures and caches.
        for output, axes in zip(outputs, carried, strict=True):
            setattr(output, _ATTRIBUTE, (self.sets.number, axes))
            if call.when_used:
                setattr(output, _PINS, (self.sets.number, call.when_used))
        groups = call.groups[0] if call.groups else None
        self.trace.steps.append(TracedCall(name, where, _shapes(outputs), inputs, carried, groups))
        return result

    def _note_use(self, name: str, given: list[Tensor], outputs: list[Tensor]) -> None:
        """Which results are used: those that an operator that computes takes, moved or as they are."""
        sources = frozenset().union(*(_sources_of(tensor, self.trace) for tensor in given))
        if name not in MOVES:
            self.trace.used |= sources
            sources = frozenset((len(self.trace.digests),))
        for output in outputs:
            setattr(output, _SOURCES, (id(self.trace), sources))

    def axes_of(self, tensor: Tensor) -> Axes:
        assert self.sets is not None
        name = self.names.get(id(tensor))
        if (found := _labelled(tensor, self.sets)) is not None or name is None or not tensor.is_floating_point():
            return found or (None,) * tensor.dim()
        # A dimension of size 1 has no position to lose, and operators broadcast it.
        axes = tuple(self.sets.add_axis(name, dim, size) if size > 1 else None for dim, size in enumerate(tensor.shape))
        setattr(tensor, _ATTRIBUTE, (self.sets.number, axes))
        return axes

    def choose(self, kind: str, num_options: int, labels: Tensor) -> int:
        key = f"{kind} {self.paths.number(kind)} of {type(self.paths.module).__qualname__}"
        self.trace.choices.append(LabelChoice(key, num_options, labels))
        return self.options.get(key, 0) % num_options


def watch(
    model: nn.Module,
    call: ModelCall,
    sets: LabelSets | None = None,
    names: Mapping[int, str] | None = None,
    options: Mapping[str, int] | None = None,
    values: Sequence[Survivors] | None = None,
) -> Trace:
    """Run the model once. An exception ends the run and is kept in the trace.

    `sets`: where labels are joined. `values`: keep digests of results, for each step of these positions only.
    """
    trace = Trace()
    paths = ModulePaths(model)
    args, kwargs = cloned(call)  # the model may write into its inputs
    try:
        with plain_operators(), paths.watched():
            with _Watch(paths, trace, sets, names or {}, options or {}, values):
                trace.outputs = results_of(model, args, kwargs)
            trace.used.update(*(_sources_of(tensor, trace) for tensor in trace.outputs))
    except Exception as error:
        trace.error, trace.failed_in = error, paths.failed_in
    if sets is not None:
        kept = [x for module in model.modules() for value in vars(module).values() for x in tensors_inside(value)]
        enact_pins(sets, [*trace.outputs, *kept])
    return trace


def enact_pins(sets: LabelSets, used: Iterable[Tensor]) -> None:
    """Apply the pins that were recorded for the case that these tensors are used."""
    for tensor in used:
        number, pins = getattr(tensor, _PINS, (0, ()))
        if number == sets.number:
            delattr(tensor, _PINS)
            for act, labels, reason in pins:
                act(labels, reason)


def outputs_of(model: nn.Module, call: ModelCall) -> list[Tensor]:
    """The model's outputs, by the same operators as in a run that is watched."""
    args, kwargs = cloned(call)
    with plain_operators():
        return results_of(model, args, kwargs)


@contextlib.contextmanager
def plain_operators(*, with_grad: bool = False) -> Iterator[None]:
    """Turn off torch's fused operator for a whole attention or encoder layer, which would hide its parts."""
    with unfused_attention(), torch.set_grad_enabled(with_grad), sdpa_kernel(SDPBackend.MATH):
        yield


def _digest(tensor: Tensor, dims: Mapping[int, Tensor]) -> tuple[float, float]:
    """A weighted sum of the values, and its natural size."""
    values = tensor.detach().double() if not tensor.is_complex() else torch.view_as_real(tensor.detach()).double()
    for dim, places in dims.items():
        values = values.index_select(dim, places)
    flat = values.flatten().nan_to_num()
    # A plain sum would not notice values that changed places, so each place has its own weight.
    weights = torch.cos(torch.arange(flat.numel(), dtype=torch.float64) * 0.7)
    return float((flat * weights).sum()), float((flat * weights).abs().sum())


def _shapes(tensors: Iterable[Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in tensors)


def _sources_of(tensor: Tensor, trace: Trace) -> frozenset[int]:
    """The steps of a run whose values a tensor holds."""
    number, sources = getattr(tensor, _SOURCES, (0, frozenset()))
    return sources if number == id(trace) else frozenset()


def _labelled(tensor: Tensor, sets: LabelSets) -> Axes | None:
    # A tensor that a model keeps from run to run, outside of itself, may have labels of an earlier analysis.
    number, axes = getattr(tensor, _ATTRIBUTE, (0, ()))
    return axes if number == sets.number and len(axes) == tensor.dim() else None


def axes_of(tensor: Tensor, sets: LabelSets) -> Axes:
    """The labels that a run with these sets gave to a tensor."""
    return _labelled(tensor, sets) or (None,) * tensor.dim()
