"""`CheckedModel`: calls that take a way through the copy for the first time are compared with the model's own code."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

from sparsebit.errors import CaptureError
from sparsebit.execution.batches import Call
from sparsebit.graph.nested import is_symbolic, tensors_of
from sparsebit.graph.outcome import Randomness, cloned, outcome_of, undisturbed_randomness
from sparsebit.graph.verification import Reference
from sparsebit.quantization.verified import VerifiedModel

log = logging.getLogger(__name__)

_FIRST_CALLS = threading.RLock()


class CheckedModel(VerifiedModel):
    """Compares the first call, where there were no example inputs, and the first one that runs the model's own code.

    Other threads wait meanwhile. A call without real tensors (an export, a compiler's) is not the first one.
    """

    _is_comparing = False

    def _verify_first_call(self, call: Call) -> None:
        """Compare the copy on the first call's inputs, without a trace of that: the call itself runs afterwards."""

        def compare() -> None:
            quantizers = self.quantizers()
            is_exported = bool(self.plan) and not quantizers  # they are replaced for as long as an export takes
            if not is_exported and not any(q.is_enable or q.is_calibrated for q in quantizers):
                self._proved(cloned(call), "the first call", super(CheckedModel, self).forward, keep_state=True)

        self._once("_first_call_is_due", call, compare)

    def _run_source(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """For a call that the graph does not stand for: the model's own code, with quantized layers in it.

        Code that asks for a layer's very type, say, is another function then; the graph was not.
        """
        if self._source_is_unproved:
            self._once("_source_is_unproved", (args, kwargs), lambda: self._check_source((args, kwargs)))
        return super()._run_source(args, kwargs)

    def _once(self, flag: str, call: Call, compare: Callable[[], None]) -> None:
        """Run `compare` if `flag` is still set, and clear it."""
        if is_symbolic(tensors_of(call)):
            return
        with _FIRST_CALLS:
            if not getattr(self, flag) or self._is_comparing:
                return
            self._is_comparing = True
            try:
                with torch.no_grad(), undisturbed_randomness():
                    compare()
            finally:
                self._is_comparing = False
                setattr(self, flag, False)

    def _check_source(self, call: Call) -> None:
        """An error where the copy's own code, with quantization off, does something else than the original's."""
        reason = self._why_not_comparable()
        if reason:
            log.info("a call of another form is not compared with the model's own code: %s", reason)
            return
        reference, randomness = Reference(self.original, self.device, training=self.training), Randomness.now()
        try:
            expected = reference.outcome(cloned(call), randomness)
        except Exception as error:  # the user sees it next
            log.debug("the model's own code fails: %s: %s", type(error).__name__, error)
            return
        twin = copy.deepcopy(self)  # whose quantizers no other thread uses
        twin.set_quant(w_quant=False, a_quant=False)
        with self._unseen():
            outcome = outcome_of(twin._source, cloned(call), twin._watched_buffers())
        found = outcome.difference(expected)
        if found is not None and reference.repeats(cloned(call), expected, randomness):
            raise CaptureError(
                "the inputs of this call have another form than the captured ones, and the model's own code, which "
                f"runs for them, computes something else when its layers are quantized: {found}; build the QuantModel "
                "with example_inputs like this call's"
            )
