"""`CarriedState`: changes that calls have made to a copy's buffers and attributes, kept when it is captured again.

A forward may count its calls or fill a cache. A call of another form captures the model anew from the original, which
has none of these changes; so they are read from the old copy and written into the new one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import CaptureError
from sparsebit.graph.checking.outcome import tensor_at
from sparsebit.graph.nodes.stand_in import StandIn
from sparsebit.graph.state.state import CONTAINERS, ModuleState, states_of

AGAIN = "the model has to be captured again for this call"
LIKE_THIS = "build the QuantModel with example_inputs like this call's"
_MISSING = object()
_PLAIN = (bool, int, float, complex, str, bytes, Tensor, type(None))


class BuiltState:
    """Remembers the attributes of a copy's modules as they were built, to find those that calls have changed.

    `source`: the copy's own code; modules are found by their paths in the original.
    """

    def __init__(self, original: nn.Module, source: nn.Module) -> None:
        twins = {path: (module, twin_at(source, path)) for path, module in original.named_modules()}
        self.states: dict[str, ModuleState] = {
            path: state
            for path, (module, twin) in twins.items()
            if twin is not None and type(twin) is type(module)
            for state in states_of(twin, inside=False)
        }

    def of_copy(self, original: nn.Module, source: nn.Module) -> BuiltState:
        """The same for a deep copy of the model; attributes that have changed here count as changed there, too."""
        new = BuiltState(original, source)
        for path, name in self.changes():
            if path in new.states:
                new.states[path].fingerprints[name] = _MISSING  # equal to no value's fingerprint
        return new

    def changes(self) -> dict[tuple[str, str], Any]:
        """(path, attribute) -> its current value."""
        return {
            (path, name): state.module.__dict__.get(name, _MISSING)
            for path, state in self.states.items()
            for name in state.changes()
        }


@dataclass(frozen=True)
class CarriedState:
    """The changes that calls have made in a copy."""

    attributes: dict[tuple[str, str], Any]
    buffers: dict[str, Tensor]

    @classmethod
    def of(cls, built: BuiltState, original: nn.Module, source: nn.Module, without: Collection[int]) -> CarriedState:
        """`without`: ids of buffers that are not state (of folded norms). Changed attributes must be plain values."""
        attributes = built.changes()
        if lost := [f"{path}.{name}".lstrip(".") for (path, name), value in attributes.items() if not _is_plain(value)]:
            raise CaptureError(f"{AGAIN}, but {lost[0]} has changed since it was built, and would be lost; {LIKE_THIS}")
        buffers = {
            name: twin.clone()
            for name, buffer in original.named_buffers()
            if (twin := tensor_at(source, name)) is not None
            and id(twin) not in without
            and twin.shape == buffer.shape
            and not torch.equal(twin, buffer.to(twin))
        }
        return cls(attributes, buffers)

    @torch.no_grad()
    def put_into(self, source: nn.Module) -> None:
        for (path, name), value in self.attributes.items():
            module = twin_at(source, path)
            if module is not None:
                module.__dict__.pop(name, None)
                module.__dict__.update({} if value is _MISSING else {name: value})
        for name, value in self.buffers.items():
            buffer = tensor_at(source, name)
            if buffer is not None and buffer.shape == value.shape:
                buffer.copy_(value)


def twin_at(source: nn.Module, path: str) -> nn.Module | None:
    """The module at `path` in the copy's own code; a stand-in is replaced by its module."""
    module: nn.Module | None = source
    for name in path.split(".") if path else ():
        if module is None or isinstance(module, torch.jit.ScriptModule):  # it keeps its state elsewhere
            return None
        module = module._modules.get(name)
        while isinstance(module, StandIn):
            module = module._replaced_module()
    return module


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, *CONTAINERS)):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return value is _MISSING or isinstance(value, _PLAIN)
