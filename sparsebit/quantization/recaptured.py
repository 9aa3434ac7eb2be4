"""`RecapturedModel`: a simulated model that can be captured again, with modules that run their own code."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from torch import nn

from sparsebit.errors import CaptureError
from sparsebit.execution.batches import Call
from sparsebit.graph.call_form import call_form, has_forward
from sparsebit.graph.leaf_policy import LeafPolicy
from sparsebit.graph.outcome import Buffers, Randomness, buffers_of, cloned
from sparsebit.graph.passes.fold_batchnorm import Absorbed
from sparsebit.graph.verification import Compare, Reference
from sparsebit.quantization.carried_state import BuiltState, CarriedState
from sparsebit.quantization.simulation import SimulatedModel

log = logging.getLogger(__name__)

# How often a model is captured again, each time with fewer modules as graphs, before a difference is only reported.
ATTEMPTS = 12


class RecapturedModel(SimulatedModel):
    """Keeps parameters and state over a new capture, and cuts modules out of the graph."""

    _built_weights: tuple[Any, ...] = ()
    _built_state: BuiltState

    def _build(self, *args: Any, **kwargs: Any) -> None:
        super()._build(*args, **kwargs)
        self._built_weights = self._weights_now()
        self._built_state = BuiltState(self.original, self.source)

    def _weights_now(self) -> tuple[Any, ...]:
        """Another value after any change to the weights, here or in the original."""
        original = self.original
        return tuple((id(p), p._version, p.dtype) for module in (original, self.model) for p in module.parameters())

    def _rebuild(self, example: Call | None) -> None:
        if self._weights_now() != self._built_weights:
            raise CaptureError(
                "the model has to be captured again for this call, but its weights have changed since it was built, "
                "and would be lost; build the QuantModel with example_inputs like this call's before changing them"
            )
        before = dict(self.named_parameters())
        super()._rebuild(example)
        self._keep_parameters(before)

    def _keep_parameters(self, before: dict[str, nn.Parameter]) -> None:
        """Put the parameters of the last capture back where they are the same: an optimizer may hold them."""
        same = {
            id(new): old
            for name, new in self.named_parameters()
            if (old := before.get(name)) is not None and old.shape == new.shape and torch.equal(old, new)
        }
        for module in (*self.modules(), *self._code_modules()):
            for name, parameter in module._parameters.items():
                if id(parameter) in same:
                    module._parameters[name] = same[id(parameter)]
        self._built_weights = self._weights_now()

    def _capture_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        state = CarriedState.of(self._built_state, self.original, self.source, self._folded_tensors())
        super()._capture_again(args, kwargs)
        state.put_into(self.source)

    def _differing(
        self, call: Call, found: str, reference: Reference, randomness: Randomness, compare: Compare | None = None
    ) -> dict[str, str]:
        """The smallest modules that differ, and how."""
        paths, build = _with_code(self.original, self._policy), self._part_with_buffers
        return reference.smallest_differing(cloned(call), paths, build, randomness, compare=compare) or {"": found}

    def _cut(
        self, call: Call, found: str, reference: Reference, randomness: Randomness, compare: Compare | None = None
    ) -> None:
        """Capture again, with the smallest modules that differ running their own code.

        Where such a module does already, the modules inside it do too; after that it stays untouched, in float.
        """
        model = self.original
        policy = self._policy
        for path, why in self._differing(call, found, reference, randomness, compare).items():
            log.warning("%s runs its own code: its graph computes something else: %s", path or "the model", why)
            reason = f"its graph computes something else than its code: {why}"
            inside = [name for name in _with_code(model, policy, path) if name not in policy.own_code]
            for name in inside if path in policy.own_code and inside else [path]:
                policy = policy.cut(name, reason)
        self._policy = policy
        self._rebuild(call if self._example is not None else None)

    def _part_with_buffers(self, path: str, module: nn.Module, call: Call) -> tuple[nn.Module, Buffers]:
        part = self._part(path, module, call)
        return part, buffers_of(part.source, module)

    def _part(self, path: str, module: nn.Module, call: Call) -> SimulatedModel:
        """A copy of one module of the original, captured and with quantizers as in the whole, off."""
        part = SimulatedModel.__new__(SimulatedModel)
        nn.Module.__init__(part)
        example, form = (call, None) if self._example is not None else (None, call_form(module, *call))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user is warned when the whole is built
            transforms = () if path else self._transforms  # they know the whole graph
            policy = self._policy.below(path, module)
            part._set_up(module, self.config, example, policy, form, transforms=transforms)
        return part.to(self.device).train(self.training)

    @property
    def _has_one_mode(self) -> bool:
        """Whether train mode differs from the original's by design."""
        is_folded = any(isinstance(module, Absorbed) for module in self._code_modules())
        return is_folded or bool(self._captured.eval_branches)


def _with_code(model: nn.Module, policy: LeafPolicy, path: str = "") -> list[str]:
    """The paths, from `path` down, of the modules whose own code can run in place of a graph: all but leaves."""
    modules = model.get_submodule(path).named_modules(prefix=path)
    return [name for name, module in modules if has_forward(module) and not policy.is_leaf(module, name)]
