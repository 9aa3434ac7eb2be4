"""`Outcome`: the observable effects of one call, its result and its writes into inputs and buffers, to compare.

Also the tools to run a call without side effects: `cloned` (inputs), `Snapshot` and `state_kept` (buffers, attributes,
modes), `undisturbed_randomness`. Writes are found by version counters where torch counts them, otherwise by value:
batch norms and writes through `.data` are not counted.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.graph.nodes.hidden_writes import may_write_parameters
from sparsebit.graph.state.modes import all_modules
from sparsebit.graph.state.state import PythonRandomness, states_of
from sparsebit.graph.values.comparison import difference
from sparsebit.graph.values.nested import map_nested, tensors_of

Call = tuple[tuple[Any, ...], dict[str, Any]]
Buffers = Callable[[], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Outcome:
    """The effects of a call. `inputs`: every tensor of the call, as it is afterwards; `written`: indices of those that
    changed; `buffers`: those that changed; `gradients`: by name of an input or parameter, if they were requested.
    """

    output: Any
    inputs: tuple[Tensor, ...] = ()
    written: frozenset[int] = frozenset()
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    gradients: Mapping[str, Tensor] = field(default_factory=dict)

    def difference(self, expected: Outcome) -> str | None:
        """A sentence on the first difference; None if there is none."""
        return next(filter(None, self._differences(expected)), None)

    def _differences(self, expected: Outcome) -> Iterator[str | None]:
        yield difference(self.output, expected.output)
        for index in sorted(self.written | expected.written):
            yield difference(self.inputs[index], expected.inputs[index], f"what is left in input {index}")
        for name in sorted({*self.buffers, *expected.buffers}):
            if name in self.buffers and name in expected.buffers:
                yield difference(self.buffers[name], expected.buffers[name], f"the buffer {name}")
            else:
                yield f"the buffer {name} is {'' if name in self.buffers else 'not '}written"
        for name in [name for name in expected.gradients if name in self.gradients]:
            yield difference(self.gradients[name], expected.gradients[name], f"the gradient of {name}", slack=10.0)


class Notes:
    """The values before a call, used to find what the call wrote. `buffers` returns the buffers to watch, by name."""

    def __init__(self, call: Call, buffers: Buffers = dict) -> None:
        self.tensors, self.buffers = tensors_of(call), buffers
        self.before = [_version(tensor) for tensor in self.tensors]
        # Copies, to compare by value: torch does not count the writes of batch norms.
        self.held = {name: buffer.detach().clone() for name, buffer in buffers().items()}

    def outcome(self, output: Any) -> Outcome:
        written = frozenset(i for i, tensor in enumerate(self.tensors) if _version(tensor) != self.before[i])
        changed = {name: buffer for name, buffer in self.buffers().items() if self._wrote(name, buffer)}
        copies = {name: buffer.detach().clone() for name, buffer in changed.items()}
        return Outcome(output, tuple(self.tensors), written, copies)

    def _wrote(self, name: str, buffer: Tensor) -> bool:
        was = self.held.get(name)
        return was is None or was.shape != buffer.shape or was.dtype != buffer.dtype or not torch.equal(was, buffer)


def outcome_of(run: Callable[..., Any], call: Call, buffers: Buffers = dict) -> Outcome:
    """Call `run` and record its effects."""
    notes = Notes(call, buffers)
    return notes.outcome(run(*call[0], **call[1]))


def with_gradients(
    run: Callable[..., Any], call: Call, loss: Callable[[Any], Tensor], parameters: Mapping[str, Tensor]
) -> Outcome:
    """Call `run` and differentiate `loss` of its output by the call's float tensors and by `parameters`.

    The parameters' own `grad` is left alone. Tensors that the loss does not depend on get a gradient of zeros.
    """
    args, kwargs = map_nested(Tensor, _differentiable, call)
    wanted = {f"input {index}": tensor for index, tensor in enumerate(tensors_of((args, kwargs)))}
    wanted |= parameters
    wanted = {name: tensor for name, tensor in wanted.items() if tensor.requires_grad}
    with torch.enable_grad():
        # Cloned, so that they are not leaves: a module may write into its inputs, which torch forbids for leaves.
        call = map_nested(Tensor, lambda x: x.clone() if x.requires_grad else x, (args, kwargs))
        output = run(*call[0], **call[1])
        found = torch.autograd.grad(loss(output), list(wanted.values()), allow_unused=True)
    gradients = {
        name: torch.zeros_like(tensor) if gradient is None else gradient
        for (name, tensor), gradient in zip(wanted.items(), found, strict=True)
    }
    return Outcome(map_nested(Tensor, torch.Tensor.detach, output), gradients=gradients)


def _differentiable(tensor: Tensor) -> Tensor:
    copied = tensor.detach().clone()
    return copied.requires_grad_() if copied.is_floating_point() or copied.is_complex() else copied


def cloned(call: Call) -> Call:
    """The call with its tensors copied, so that writes into them stay in the copy. Aliases stay aliases."""
    copies: dict[int, Tensor] = {}

    def clone(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = _like(tensor, tensor.detach().clone().requires_grad_(tensor.requires_grad))
        return copies[id(tensor)]

    result: Call = map_nested(Tensor, clone, call)
    return result


def _like(tensor: Tensor, copied: Tensor) -> Tensor:
    """The copy; not a leaf if the tensor is not one, because torch forbids writes into leaves that need a gradient."""
    if tensor.is_leaf:
        return copied
    with torch.enable_grad():
        return copied.clone()


def buffers_of(module: nn.Module, like: nn.Module | None = None) -> Buffers:
    """The buffers of `module`, by the names that they have in `like`, whose modules it may have wrapped."""
    names = [name for name, _ in (like or module).named_buffers()]

    def find() -> dict[str, Tensor]:
        found = {name: tensor_at(module, name) for name in names}
        return {name: value for name, value in found.items() if value is not None}

    return find


class Snapshot:
    """Keeps buffers, attributes and modes of the roots' modules, and the tensors of a call, to restore them.

    Parameters are only kept if the modules' code may write into them.
    """

    def __init__(self, *roots: nn.Module, call: Any = ()) -> None:
        modules = all_modules(*roots)
        self.states = [state for module in modules for state in states_of(module, inside=False)]
        written = [*tensors_of(call), *(tensor for state in self.states for tensor in state.tensors())]
        self.values = {id(tensor): (tensor, _version(tensor), tensor.detach().clone()) for tensor in written}
        # Restored if their values differ (version None), as torch does not count writes of batch norms, nor of `.data`.
        kept = [buffer for module in modules for buffer in module.buffers(recurse=False)]
        if any(map(may_write_parameters, roots)):
            kept += [parameter for module in modules for parameter in module.parameters(recurse=False)]
        self.script_modes = [(part, part.training) for part in modules if isinstance(part, torch.jit.ScriptModule)]
        self.values |= {id(tensor): (tensor, None, tensor.detach().clone()) for tensor in kept}

    def restore(self) -> None:
        """Put everything back, in place."""
        for state in self.states:
            state.restore()
        for part, training in self.script_modes:
            part.training = training
        with torch.no_grad():
            for tensor, version, value in self.values.values():
                is_counted = version is not None and _version(tensor) != version
                if is_counted or not _is_same(tensor, value):  # a write through `.data` is not counted
                    tensor.copy_(value)


@contextlib.contextmanager
def state_kept(*roots: nn.Module) -> Iterator[None]:
    """Undo, at the end of the block, changes to buffers, plain attributes and modes of the modules."""
    snapshot = Snapshot(*roots)
    try:
        yield
    finally:
        snapshot.restore()


def tensor_at(module: nn.Module, path: str) -> Tensor | None:
    """The parameter or buffer of that name, in a model whose modules may be wrapped."""
    root: Any = module
    found = functools.reduce(lambda part, name: getattr(part, name, None), path.split("."), root)
    return found if isinstance(found, Tensor) else None


def _version(tensor: Tensor) -> Any:
    """A value that changes with every write into the tensor; a copy of the values if it has no counter (inference)."""
    return _Values(tensor.detach().clone()) if tensor.is_inference() else tensor._version


def _is_same(tensor: Tensor, value: Tensor) -> bool:
    """Whether no number differs; sparse and nested tensors, which support few operators, are not compared."""
    is_plain = tensor.layout is torch.strided and not tensor.is_nested
    return not is_plain or _Values(tensor) == _Values(value)


class _Values:
    """A tensor's values, equal to others if all numbers are equal; NaN equals NaN."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, _Values)
        return torch.allclose(self.values, other.values, rtol=0, atol=0, equal_nan=True)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Randomness:
    """The state of every random generator that a forward may use."""

    states: tuple[Any, ...]

    @classmethod
    def now(cls) -> Randomness:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
        return cls((torch.get_rng_state(), PythonRandomness(), cuda))

    def restore(self) -> None:
        own, python, cuda = self.states
        torch.set_rng_state(own)
        python.restore()
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


def seed_generators(seed: int) -> None:
    """Seed torch's generators on the CPU and, if it is in use, on the GPU.

    `torch.manual_seed` formats the stack for a GPU that is first used later, and seeds it, which nothing could undo.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


@contextlib.contextmanager
def undisturbed_randomness(state: Randomness | None = None) -> Iterator[None]:
    """Inside, random generators start from `state` (default: the current one); afterwards they are as before."""
    now = Randomness.now()
    (state or now).restore()
    try:
        yield
    finally:
        now.restore()
