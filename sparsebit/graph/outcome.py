"""What one call of a module does: its result, and what it writes into its inputs and buffers."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.graph.comparison import difference
from sparsebit.graph.nested import map_nested, tensors_of

Call = tuple[tuple[Any, ...], dict[str, Any]]
Buffers = Callable[[], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Outcome:
    """`inputs`: every tensor of the call, after it; `written`: which of them changed; `buffers`: those that changed."""

    output: Any
    inputs: tuple[Tensor, ...] = ()
    written: frozenset[int] = frozenset()
    buffers: Mapping[str, Tensor] = field(default_factory=dict)

    def difference(self, expected: Outcome) -> str | None:
        """A sentence on the first difference; None where there is none."""
        found = difference(self.output, expected.output)
        for index in sorted(self.written | expected.written) if not found else ():
            found = found or difference(self.inputs[index], expected.inputs[index], f"what is left in input {index}")
        for name in sorted({*self.buffers, *expected.buffers}) if not found else ():
            if name not in self.buffers or name not in expected.buffers:
                wrong = "is written" if name in self.buffers else "is not written"
                found = found or f"the buffer {name} {wrong}"
            else:
                found = found or difference(self.buffers[name], expected.buffers[name], f"the buffer {name}")
        return found


class Notes:
    """What is there before a call, to tell afterwards what it wrote. `buffers` gives the buffers to watch, by name."""

    def __init__(self, call: Call, buffers: Buffers = dict) -> None:
        self.tensors, self.buffers = tensors_of(call), buffers
        self.before = [_version(tensor) for tensor in self.tensors]
        # The buffers themselves are kept, so that their ids stay their own.
        self.held = {name: (buffer, _version(buffer)) for name, buffer in buffers().items()}

    def outcome(self, output: Any) -> Outcome:
        written = frozenset(i for i, tensor in enumerate(self.tensors) if _version(tensor) != self.before[i])
        changed = {
            name: buffer.detach().clone() for name, buffer in self.buffers().items() if self._wrote(name, buffer)
        }
        return Outcome(output, tuple(self.tensors), written, changed)

    def _wrote(self, name: str, buffer: Tensor) -> bool:
        was, version = self.held.get(name, (None, None))
        return was is not buffer or _version(buffer) != version


def outcome_of(run: Callable[..., Any], call: Call, buffers: Buffers = dict) -> Outcome:
    """Call `run` and note what it did."""
    notes = Notes(call, buffers)
    return notes.outcome(run(*call[0], **call[1]))


def cloned(call: Call) -> Call:
    """The call with its tensors copied: what is written into these is not seen by others. Aliases stay aliases."""
    copies: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return copies[id(tensor)]

    result: Call = map_nested(Tensor, copy, call)
    return result


def buffers_of(module: nn.Module, like: nn.Module | None = None) -> Buffers:
    """The buffers of `module`, by the names that they have in `like`, whose modules it may have wrapped."""
    names = [name for name, _ in (like or module).named_buffers()]

    def find() -> dict[str, Tensor]:
        found = {name: _at(module, name) for name in names}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    return find


def _at(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def _version(tensor: Tensor) -> Any:
    """Another value after a write into the tensor; of an inference tensor, which does not count them, always."""
    return object() if tensor.is_inference() else tensor._version


@dataclass(frozen=True)
class Randomness:
    """The state of every random generator that a forward may use."""

    states: tuple[Any, ...]

    @classmethod
    def now(cls) -> Randomness:
        numpy = sys.modules.get("numpy")
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
        return cls((torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None, cuda))

    def restore(self) -> None:
        own, python, numpy_state, cuda = self.states
        torch.set_rng_state(own)
        random.setstate(python)
        if numpy_state is not None:
            sys.modules["numpy"].random.set_state(numpy_state)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


@contextlib.contextmanager
def undisturbed_randomness(state: Randomness | None = None) -> Iterator[None]:
    """Inside, random numbers come as from `state` (default: as now); afterwards as if nothing had been drawn."""
    now = Randomness.now()
    (state or now).restore()
    try:
        yield
    finally:
        now.restore()
