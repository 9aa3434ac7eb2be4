"""Around each call of a module whose code is traced: raises an error if the call does what a graph cannot represent.

This covers state that the next call reads (attributes, globals, an assigned buffer), hooks, Python's randomness, and
whatever the tracer refused while the code ran, even if that code caught the error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn

from torch import fx, nn

from sparsebit.graph.nodes.value_kinds import is_write_into
from sparsebit.graph.state.outer_state import Kinds, OuterState, Place
from sparsebit.graph.state.state import PythonRandomness, states_of
from sparsebit.graph.state.training_flag import note_identity_test
from sparsebit.graph.tracing.untraceable import has_hooks


class TracedCalls:
    """The calls of one trace. `places`: where the code of each class keeps state outside of the model."""

    def __init__(self, tracer: Any) -> None:
        self.places: dict[Kinds, list[Place]] = {}
        self._tracer = tracer
        self._refusals: list[str] = []

    def refuse(self, reason: str) -> NoReturn:
        """End the trace of the module whose code runs now; the reason is kept, as that code may catch the error."""
        self._refusals.append(reason)
        raise fx.proxy.TraceError(reason)

    @contextlib.contextmanager
    def kept_faithful(self, module: nn.Module, path: str) -> Iterator[None]:
        """Inside, one call of `module` runs. Its changes of state are undone."""
        refusals, randomness = len(self._refusals), PythonRandomness()
        states, outside = states_of(module), OuterState([module], self.places)
        try:
            if has_hooks(module):
                self.refuse("it has hooks, which must run at every call")
            note_identity_test(self._tracer, path, module)
            yield
            if len(self._refusals) > refusals:
                raise fx.proxy.TraceError(self._refusals[refusals])
            self._check_assigned(module, path)
            attributes = (f"the attribute {name!r}" for state in states if (name := state.changed()) is not None)
            changed = next(attributes, None) or outside.changed()
            if changed is not None:
                raise fx.proxy.TraceError(f"changes {changed}: the next call may depend on this one")
            if randomness.has_changed():
                randomness.restore()
                raise fx.proxy.TraceError("draws from Python's or NumPy's random generator, anew at every call")
        finally:
            del self._refusals[refusals:]
            for state in states:
                state.restore()
            outside.restore()

    def _check_assigned(self, module: nn.Module, path: str) -> None:
        """Put back buffers that forward assigned: only a write into the same one (`self.steps += 1`) can be traced."""
        for name, value in list(module._buffers.items()):
            if isinstance(value, fx.Proxy):
                full = f"{path}.{name}" if path else name
                module._buffers[name] = self._tracer.tensors[full]
                if not is_write_into(value.node, full):
                    raise fx.proxy.TraceError(f"assigns its buffer {name!r}: the next call depends on this one")
