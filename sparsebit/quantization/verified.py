"""`VerifiedModel`: a simulated model that is compared with the original's own code before it is trusted."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparsebit.config.reading import Source
from sparsebit.config.schema import QuantConfig
from sparsebit.errors import CaptureError, SparsebitError
from sparsebit.execution.batches import Call, as_call, to_device
from sparsebit.graph.nested import tensors_of
from sparsebit.graph.outcome import (
    Buffers,
    Outcome,
    Randomness,
    buffers_of,
    cloned,
    outcome_of,
    state_kept,
    tensor_at,
    undisturbed_randomness,
)
from sparsebit.graph.outer_state import OuterState, undisturbed_outer_state
from sparsebit.graph.verification import Reference, is_within
from sparsebit.numerics.full_float32 import full_float32
from sparsebit.quantization.carried_state import twin_at
from sparsebit.quantization.gradient_check import GradientCheckedModel
from sparsebit.quantization.harmless_differences import ForgivingModel
from sparsebit.quantization.ops.quant_opr import QIdentity, QuantOpr
from sparsebit.quantization.recaptured import ATTEMPTS
from sparsebit.quantization.sites import Plan
from sparsebit.quantization.stages import Transform, name_of
from sparsebit.records import Coverage

log = logging.getLogger(__name__)


class VerifiedModel(GradientCheckedModel, ForgivingModel):
    """Compares itself, with quantization off, with the model it was made from: on `example_inputs` (without any, on the
    inputs of the first call) and on the first calibration batch, in values, dtypes, shapes and what is written into
    inputs and buffers.

    The smallest module that differs runs its own code from then on; one that differs even so is left untouched, in
    float. `coverage` names it. `verify="calibration"` leaves out the example and the first call; `verify=False` leaves
    out all, and with them a forward of the float model each.
    """

    _verifies: bool | Literal["calibration"] = False
    _proof_is_due = False  # whether the next calibration batch has to be compared
    _first_call_is_due = False
    _compares_sources = False  # whether own code that runs in the place of a graph is compared, at its first call
    _unproved = ""  # why the copy is not known to be the same function

    def __init__(
        self,
        model: nn.Module,
        config: Source | QuantConfig | None = None,
        *,
        plan: Plan | None = None,
        transforms: Sequence[Transform] = (),
        example_inputs: Any = None,
        verify: bool | Literal["calibration"] = True,
    ) -> None:
        super().__init__(model, config, plan=plan, transforms=transforms, example_inputs=example_inputs)
        self._verifies = verify
        if not verify:
            self._unproved = "verify=False: the copy was not compared with the model's own code"
        elif verify != "calibration" and example_inputs is not None:
            self._verify_example(as_call(example_inputs, model))
        self._first_call_is_due = verify is True and example_inputs is None
        self._compares_sources = bool(verify)

    @property
    def coverage(self) -> Coverage:
        """What is quantized, what is float and why."""
        found = super().coverage
        return dataclasses.replace(found, notes=(*found.notes, self._unproved)) if self._unproved else found

    def _verify_example(self, call: Call) -> None:
        call = to_device(call, self.device)
        if any(tensor.is_meta for tensor in tensors_of(call)):
            return
        with torch.no_grad(), undisturbed_randomness():
            self._proved(cloned(call), "example_inputs", super().forward, keep_state=True)

    def _verified(self, call: Call, occasion: str, run: Callable[..., Any]) -> Any:
        """What `run` gives for `call`, once that is what the original's own code gives; what differs is cut out."""
        outcome = self._proved(call, occasion, run)
        return run(*call[0], **call[1]) if outcome is None else outcome.output

    @full_float32()
    def _proved(
        self, call: Call, occasion: str, run: Callable[..., Any], *, keep_state: bool = False
    ) -> Outcome | None:
        """What the copy does with `call`, once that is what the original does; None where it did not run, or failed.

        `keep_state`: the copy's buffers and attributes are afterwards what they were.
        """
        self._proof_is_due = False
        if self._root is not None and self._root.bind(*call) is None:
            self._capture_again(*call)
            self._proof_is_due = False
        reason = self._why_not_comparable()
        if reason:
            log.info("%s is not compared with the model's own code: %s", occasion, reason)
            return None
        given, randomness = cloned(call), Randomness.now()
        reference = self._reference()
        try:
            expected = reference.outcome(cloned(call), randomness)
        except Exception as error:  # the copy's forward shows it to the user
            log.debug("the model's own code fails on %s: %s: %s", occasion, type(error).__name__, error)
            return None
        outcome: Outcome | None = None
        outside = OuterState(self.source.modules(), {})
        repeats = True
        for attempt in range(ATTEMPTS):
            found, outcome = self._compare(call, run, expected, keep_state)
            if found is None or (outcome is not None and self._is_no_fault(given, expected, randomness)):
                log.info("the copy computes what the model's own code computes on %s", occasion)
                break
            if self._transforms:
                raise CaptureError(
                    f"after the transforms {', '.join(map(name_of, self._transforms))} the model computes something "
                    f"else on {occasion}: {found}; a transform must keep what the graph computes (verify=False is for "
                    "those that are meant to change it)"
                )
            if registered := self._registered_ops():
                self._unproved = f"with ops that you registered ({registered}) the copy differs on {occasion}: {found}"
                break
            if not repeats or not reference.repeats(cloned(given), expected, randomness):
                self._unproved = f"the model's own code gives another result when {occasion} runs again: {found}"
                if not repeats or outcome is None or "" in self._captured.untraced:
                    break
                repeats = False  # a graph would give one of its results at every call
            elif attempt == ATTEMPTS - 1:
                self._unproved = f"the copy differs from the model's own code on {occasion}: {found}"
                warnings.warn(f"{self._unproved}; what it computes is not what the model computes", stacklevel=5)
                break
            self._cut(given, found, reference, randomness)
            _put_back(call, given)
            outside.restore()
            randomness.restore()
        if keep_state:  # parameters that the forward wrote into are what they were
            self._built_weights = self._weights_now()
        return outcome

    def _cut(self, *args: Any, **kwargs: Any) -> None:
        super()._cut(*args, **kwargs)
        self._proof_is_due = False

    def _reference(self, path: str = "") -> Reference:
        """The own code of the original's module at `path`, in the modes that the copy's modules have now."""
        module = self.original.get_submodule(path)
        prefix = f"{path}." if path else ""
        twins = {name: twin_at(self.source, f"{prefix}{name}" if name else path) for name, _ in module.named_modules()}
        modes = {name: twin.training for name, twin in twins.items() if twin is not None}
        return Reference(module, self.device, training=modes.get("", self.training), modes=modes)

    def _why_not_comparable(self, path: str = "") -> str:
        """Why the original's module at `path` may well give something else than the copy's; "" where it may not."""
        if self._weights_now() != self._built_weights:
            return "the weights have changed since the model was captured"
        if not self._has_equal_buffers(path):
            return "the buffers have changed since the model was captured"
        if any(is_within(module, path) for module, _ in self._built_state.changes()):
            return "attributes have changed since the model was captured"
        if self.training and self._has_one_mode:
            return "in train mode folded batch norms and captured eval branches differ from it by design"
        return ""

    def _has_equal_buffers(self, path: str) -> bool:
        """Whether the original's buffers below `path` hold what the copy's hold; those of folded norms do not count."""
        folded = self._folded_tensors()
        buffers = self.original.get_submodule(path).named_buffers(prefix=path)
        pairs = [(buffer, tensor_at(self.source, name)) for name, buffer in buffers]
        return all(
            torch.equal(twin, buffer.to(twin))
            for buffer, twin in pairs
            if twin is not None and id(twin) not in folded and twin.shape == buffer.shape and not twin.is_sparse
        )

    def _registered_ops(self) -> str:
        """The ops of the model that users registered: what these compute may be meant to differ."""
        ops = (part for part in self.model.modules() if isinstance(part, QuantOpr) and not isinstance(part, QIdentity))
        return ", ".join(sorted({type(part).__name__ for part in ops if part.row.implementation is not None}))

    def _compare(
        self, call: Call, run: Callable[..., Any], expected: Outcome, keep_state: bool
    ) -> tuple[str | None, Outcome | None]:
        """What differs, and what the copy did; None where it failed."""
        with self._unseen() if keep_state else contextlib.nullcontext():
            try:
                outcome = outcome_of(run, call, self._watched_buffers())
            except SparsebitError:
                raise
            except Exception as error:
                return f"{type(error).__name__}: {error}", None
            return outcome.difference(expected), outcome

    def _watched_buffers(self) -> Buffers:
        return buffers_of(self.source, self.original)

    @contextlib.contextmanager
    def _unseen(self) -> Iterator[None]:
        """What forwards of the copy do inside to state is undone, in the copy and outside of it."""
        with undisturbed_outer_state(self.source), state_kept(self.model, self.source):
            yield


@torch.no_grad()
def _put_back(call: Call, given: Call) -> None:
    """Undo what a forward wrote into its inputs."""
    for tensor, before in zip(tensors_of(call), tensors_of(given), strict=True):
        if isinstance(tensor, Tensor) and not tensor.is_inference():
            tensor.copy_(before)
