"""`VerifiedModel`: a simulated model that is compared with the original's own code before it is trusted."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparsebit.config.schema import QuantConfig
from sparsebit.execution.batches import Call, as_call, to_device
from sparsebit.graph.capture import call_form, has_forward
from sparsebit.graph.copying import copy_model
from sparsebit.graph.nested import tensors_of
from sparsebit.graph.outcome import Buffers, Outcome, Randomness, buffers_of, cloned, outcome_of
from sparsebit.graph.passes.fold_batchnorm import Folded
from sparsebit.graph.verification import Reference, in_double, modes_kept
from sparsebit.quantization.simulation import SimulatedModel
from sparsebit.records import Coverage

log = logging.getLogger(__name__)

# How often the model is captured again, each time with less of it as graphs, before a difference is only reported.
_ATTEMPTS = 12


class VerifiedModel(SimulatedModel):
    """Compares itself, with quantization off, with the model it was made from: on `example_inputs` and on the first
    calibration batch, in values, dtypes, shapes and what is written into inputs and buffers.

    The smallest module that differs runs its own code from then on; one that differs even so is left untouched, in
    float. `coverage` names it. `verify="calibration"` leaves out the example; `verify=False` leaves out both, and with
    them a forward of the float model each.
    """

    _verifies: bool | Literal["calibration"] = False
    _proof_is_due = False  # whether the next calibration batch has to be compared
    _built_weights: tuple[Any, ...] = ()
    _unproved = ""  # why the copy is not known to be the same function

    def __init__(
        self,
        model: nn.Module,
        config: QuantConfig,
        *,
        example_inputs: Any = None,
        verify: bool | Literal["calibration"] = True,
    ) -> None:
        super().__init__(model, config, example_inputs=example_inputs)
        self._verifies = verify
        if not verify:
            self._unproved = "verify=False: the copy was not compared with the model's own code"
        elif verify != "calibration" and example_inputs is not None:
            self._verify_example(as_call(example_inputs, model))

    @property
    def coverage(self) -> Coverage:
        """What is quantized, what is float and why."""
        found = super().coverage
        return dataclasses.replace(found, notes=(*found.notes, self._unproved)) if self._unproved else found

    def _build(self, *args: Any, **kwargs: Any) -> None:
        super()._build(*args, **kwargs)
        self._built_weights = self._weights_now()

    def _weights_now(self) -> tuple[Any, ...]:
        """Another value after any change to the weights, here or in the original."""
        (original,) = self._original
        return tuple((id(p), p._version, p.dtype) for module in (original, self.model) for p in module.parameters())

    def _verify_example(self, call: Call) -> None:
        call = to_device(call, self.device)
        if any(tensor.is_meta for tensor in tensors_of(call)):
            return
        with torch.no_grad(), modes_kept(self, self._source):
            self.eval()
            self._verified(call, "example_inputs", super().forward)

    def _verified(self, call: Call, occasion: str, run: Callable[..., Any]) -> Any:
        """What `run` gives for `call`, once that is what the original's own code gives; what differs is cut out."""
        self._proof_is_due = False
        if self._root is not None and self._root.bind(*call) is None:
            self._capture_again(*call)
            self._proof_is_due = False
        reason = self._why_not_comparable()
        if reason:
            log.info("%s is not compared with the model's own code: %s", occasion, reason)
            return run(*call[0], **call[1])
        given, randomness = cloned(call), Randomness.now()
        reference = Reference(self._original[0], self.device, training=self.training)
        try:
            expected = reference.outcome(cloned(call), randomness)
        except Exception as error:  # the copy's forward shows it to the user
            log.debug("the model's own code fails on %s: %s: %s", occasion, type(error).__name__, error)
            return run(*call[0], **call[1])
        for _ in range(_ATTEMPTS):
            outcome, found = self._compare(call, run, expected)
            if found is None or self._is_rounding(given, randomness):
                log.info("the copy computes what the model's own code computes on %s", occasion)
                return outcome.output
            if not reference.repeats(cloned(given), expected, randomness):
                self._unproved = f"the model's own code gives another result for the same {occasion} again: {found}"
                return outcome.output
            self._cut(given, found, reference, randomness)
            _put_back(call, given)
            randomness.restore()
        outcome, found = self._compare(call, run, expected)
        if found is not None:
            self._unproved = f"the copy differs from the model's own code on {occasion}: {found}"
            warnings.warn(f"{self._unproved}; what it computes is not what the model computes", stacklevel=4)
        return outcome.output

    def _why_not_comparable(self) -> str:
        if self._weights_now() != self._built_weights:
            return "the weights have changed since the model was captured"
        is_one_mode = self._captured.eval_branches or any(isinstance(part, Folded) for part in self._source.modules())
        if self.training and is_one_mode:
            return "in train mode folded batch norms and captured eval branches differ from it by design"
        return ""

    def _compare(self, call: Call, run: Callable[..., Any], expected: Outcome) -> tuple[Outcome, str | None]:
        outcome = outcome_of(run, call, buffers_of(self._source, self._original[0]))
        return outcome, outcome.difference(expected)

    def _cut(self, call: Call, found: str, reference: Reference, randomness: Randomness) -> None:
        """Capture again, with the smallest modules that differ running their own code."""
        (model,) = self._original
        policy = self._policy
        paths = [path for path, part in model.named_modules() if has_forward(part) and not policy.is_leaf(part, path)]
        differing = reference.smallest_differing(cloned(call), paths, self._part_with_buffers, randomness)
        differing = differing or {"": found}
        for path, why in differing.items():
            log.warning("%s runs its own code: its graph computes something else: %s", path or "the model", why)
            policy = policy.cut(path, f"its graph computes something else than its code: {why}")
        self._policy = policy
        self._rebuild(call if self._example is not None else None)
        self._proof_is_due = False

    def _part_with_buffers(self, path: str, module: nn.Module, call: Call) -> tuple[nn.Module, Buffers]:
        part = self._part(path, module, call)
        return part, buffers_of(part._source, module)

    def _part(self, path: str, module: nn.Module, call: Call) -> SimulatedModel:
        """A copy of one module, captured and with quantizers as in the whole, off."""
        part = SimulatedModel.__new__(SimulatedModel)
        nn.Module.__init__(part)
        example, form = (call, None) if self._example is not None else (None, call_form(module, *call))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user is warned when the whole is built
            part._set_up(module, self.config, example, self._policy.below(path, module), form)
        return part.to(self.device).train(self.training)

    def _is_rounding(self, call: Call, randomness: Randomness) -> bool:
        """Whether copy and original are the same in float64: then only rounding, amplified by the model, differs."""
        (model,) = self._original
        if any(x.dtype == torch.float64 for x in (*model.parameters(), *tensors_of(call))):
            return False
        now = Randomness.now()
        try:
            double = copy_model(model).double()
            part = self._part("", double, in_double(call))
            reference = Reference(double, self.device, training=self.training)
            expected = reference.outcome(in_double(cloned(call)), randomness)
            randomness.restore()
            outcome = outcome_of(part, in_double(cloned(call)), buffers_of(part._source, double))
        except Exception as error:
            log.debug("no comparison in float64: %s: %s", type(error).__name__, error)
            return False
        finally:
            now.restore()
        return outcome.difference(expected) is None


@torch.no_grad()
def _put_back(call: Call, given: Call) -> None:
    """Undo what a forward wrote into its inputs."""
    for tensor, before in zip(tensors_of(call), tensors_of(given), strict=True):
        if isinstance(tensor, Tensor) and not tensor.is_inference():
            tensor.copy_(before)
