"""`Reference`: the model's own code as the reference for a captured copy; finds the modules that differ.

It runs on a copy of the model that shares the parameters, so that nothing of the user's model changes: neither buffers,
nor other state, nor the random numbers that come next. `smallest_differing` runs the model once with hooks; at each
module, a stand-in is built and run on the same inputs, random numbers and state, and its outcome compared. Called by
`quantization/faithful`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.graph.checking.outcome import (
    Buffers,
    Call,
    Notes,
    Outcome,
    Randomness,
    buffers_of,
    cloned,
    outcome_of,
    undisturbed_randomness,
    with_gradients,
)
from sparsebit.graph.nodes.hidden_writes import may_write_parameters
from sparsebit.graph.state.hooks import hooked
from sparsebit.graph.state.outer_state import undisturbed_outer_state
from sparsebit.graph.values.copying import copy_model
from sparsebit.graph.values.nested import map_nested

# (path, module, call) -> the stand-in that is compared with the module on such calls, and the stand-in's buffers.
Part = tuple[nn.Module, Buffers]
BuildPart = Callable[[str, nn.Module, Call], Part]
Compare = Callable[[nn.Module, nn.Module, Call], "str | None"]
_CALLS_LOOKED_AT = 2  # a module that one forward calls more often is compared on its first calls only


class Reference:
    """The model's own code on one device, in one mode, except for the modules in `modes`, by path."""

    def __init__(
        self, model: nn.Module, device: torch.device, *, training: bool, modes: Mapping[str, bool] | None = None
    ) -> None:
        self.model, self.device, self.training, self.modes = model, device, training, modes or {}

    def outcome(self, call: Call, randomness: Randomness | None = None) -> Outcome:
        """Run the model on `call` and record its effects. The model may write into the tensors of `call`."""
        module = self.fresh()
        with undisturbed_randomness(randomness), undisturbed_outer_state(module):
            return outcome_of(module, call, buffers_of(module))

    def fresh(self) -> nn.Module:
        """A copy of the model in its current state; changes of its state do not reach the original."""
        parameters = self.model.parameters()
        is_here = all(parameter.device == self.device for parameter in parameters)
        module = copy_model(self.model, share_parameters=is_here and not may_write_parameters(self.model))
        if not is_here:
            module.to(self.device)
        module.train(self.training)
        for path, part in module.named_modules():
            part.training = self.modes.get(path, part.training)
        return module

    def gradients(self, call: Call, loss: Callable[[Any], Tensor], randomness: Randomness) -> Outcome:
        """Output and gradients of the model's own code."""
        module = self.fresh()
        with undisturbed_randomness(randomness), undisturbed_outer_state(module):
            return with_gradients(module, call, loss, dict(module.named_parameters()))

    def repeats(self, call: Call, expected: Outcome, randomness: Randomness) -> bool:
        """Whether a second run of the model itself has the same outcome."""
        return self.outcome(call, randomness).difference(expected) is None

    def smallest_differing(
        self,
        call: Call,
        paths: Collection[str],
        build: BuildPart,
        randomness: Randomness,
        *,
        compare: Compare | None = None,
    ) -> dict[str, str]:
        """The innermost modules among `paths` whose stand-in differs: path -> difference.

        `compare` describes how a module and its stand-in differ on a call, where outcomes are not enough.
        """
        module = self.fresh()
        watch = _Watch(self.model, build, compare)
        with contextlib.ExitStack() as stack, undisturbed_randomness(randomness), undisturbed_outer_state(module):
            for path in paths:
                stack.enter_context(watch.on(path, module.get_submodule(path)))
            module(*call[0], **call[1])
        found = watch.found
        outer = {path for path in found if any(other != path and is_within(other, path) for other in found)}
        return {path: why for path, why in found.items() if path not in outer}


class _Watch:
    """Compares modules with their stand-ins while the model's own code calls them."""

    def __init__(self, model: nn.Module, build: BuildPart, compare: Compare | None) -> None:
        self.model, self.build, self.compare = model, build, compare
        self.found: dict[str, str] = {}
        self.parts: dict[str, Part] = {}

    @contextlib.contextmanager
    def on(self, path: str, module: nn.Module) -> Iterator[None]:
        started: list[tuple[Notes, Call, Randomness]] = []
        num_calls = 0

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = (args, kwargs)
            started.append((Notes(call, buffers_of(module)), cloned(call), Randomness.now()))

        def after(_: nn.Module, __: Any, ___: Any, output: Any) -> None:
            nonlocal num_calls
            (notes, call, randomness), num_calls = started.pop(), num_calls + 1
            if num_calls <= _CALLS_LOOKED_AT and path not in self.found:
                with undisturbed_randomness(randomness):
                    difference = self._difference(path, call, notes.outcome(output))
                if difference is not None:
                    self.found[path] = difference

        handles = (
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True),
        )
        with hooked(handles):
            yield

    def _difference(self, path: str, call: Call, expected: Outcome) -> str | None:
        try:
            if path not in self.parts:
                self.parts[path] = self.build(path, self.model.get_submodule(path), cloned(call))
            if self.compare is not None:
                return self.compare(self.model.get_submodule(path), self.parts[path][0], call)
            return outcome_of(self.parts[path][0], call, self.parts[path][1]).difference(expected)
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def is_within(path: str, other: str) -> bool:
    """Whether the module at `path` is the one at `other`, or is inside it."""
    return path == other or not other or path.startswith(f"{other}.")


def in_double(call: Call) -> Call:
    """The call with float64 tensors in place of narrower ones."""
    result: Call = map_nested(Tensor, lambda x: x.double() if x.is_floating_point() else x, call)
    return result
