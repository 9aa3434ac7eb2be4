"""`CheckedModel`: compares the first call of each path through the copy with the model's own code."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sparsebit.errors import CaptureError
from sparsebit.execution.batches import Call
from sparsebit.graph.copying import copy_model
from sparsebit.graph.hidden_writes import may_write_parameters
from sparsebit.graph.nested import is_symbolic, tensors_of
from sparsebit.graph.outcome import Randomness, buffers_of, cloned, outcome_of, undisturbed_randomness
from sparsebit.graph.outer_state import undisturbed_outer_state
from sparsebit.graph.region import Region
from sparsebit.graph.stand_in import without_stand_ins
from sparsebit.graph.verification import Reference
from sparsebit.numerics.full_float32 import full_float32
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.quantization.verified import VerifiedModel

log = logging.getLogger(__name__)

_FIRST_CALLS = threading.RLock()


class CheckedModel(VerifiedModel):
    """Compares the first call, where there were no example inputs, and for every captured module the first one that
    runs its own code in the place of its graph.

    Other threads wait meanwhile. A call without real tensors (an export, a compiler's) is not the first one.
    """

    _is_comparing = False
    # What the own code of a module, by path, does differently with the copy's layers in it; "" where it does not.
    _compared_sources: dict[str, str]

    def _build(self, *args: Any, **kwargs: Any) -> None:
        super()._build(*args, **kwargs)
        self._compared_sources = {}
        for region in self._captured.regions.values():
            region.before_source = self._before_source

    def _verify_first_call(self, call: Call) -> None:
        """Compare the copy on the first call's inputs, without a trace of that: the call itself runs afterwards."""

        def compare() -> None:
            quantizers = self.quantizers()
            is_exported = bool(self.plan) and not quantizers  # they are replaced for as long as an export takes
            try:
                if not is_exported and not any(q.is_enable or q.is_calibrated for q in quantizers):
                    self._proved(cloned(call), "the first call", super(CheckedModel, self).forward, keep_state=True)
            finally:
                self._first_call_is_due = False

        self._alone(lambda: self._first_call_is_due, call, compare)

    def _before_source(self, region: Region, call: Call) -> None:
        """Called before a module's own code runs instead of its graph, with quantized layers in it.

        Code that asks for a layer's very type, say, is another function then; the graph was not.
        """
        if not self._compares_sources:
            return
        path = next((path for path, known in self._captured.regions.items() if known is region), None)
        if path is None:  # of an earlier capture
            return

        def compare() -> None:
            self._compared_sources[path] = self._source_difference(path, region.source, call)

        if path not in self._compared_sources:
            self._alone(lambda: path not in self._compared_sources, call, compare)
        if found := self._compared_sources.get(path):
            raise CaptureError(
                f"the inputs of this call{f' of {path}' if path else ''} have another form than the captured ones, and "
                f"the {'module' if path else 'model'}'s own code, which runs for them, computes something else when "
                f"its layers are quantized: {found}; build the QuantModel with example_inputs like this call's"
            )

    def _alone(self, is_due: Callable[[], bool], call: Call, compare: Callable[[], None]) -> None:
        """Run `compare` if it is still due, in one thread at a time, and not inside another comparison."""
        if is_symbolic(tensors_of(call)):
            return
        with _FIRST_CALLS:
            if self._is_comparing or not is_due():
                return
            self._is_comparing = True
            try:
                with torch.no_grad(), undisturbed_randomness():
                    compare()
            finally:
                self._is_comparing = False

    def _reference_beside_source(self, path: str, source: nn.Module) -> Reference:
        if not self._why_not_comparable(path):
            return self._reference(path)
        plain = without_stand_ins(copy_model(source, share_parameters=True, share=[self]))
        modes = {name: module.training for name, module in plain.named_modules()}
        return Reference(plain, self.device, training=plain.training, modes=modes)

    @full_float32()
    def _source_difference(self, path: str, source: nn.Module, call: Call) -> str:
        """What the copy's own code at `path`, with quantization off, does differently from the original's.

        Where the original has other weights or another state by now, the same code with plain layers is asked instead.
        """
        reference = self._reference_beside_source(path, source)
        randomness = Randomness.now()
        try:
            expected = reference.outcome(cloned(call), randomness)
        except Exception as error:  # the user sees it next
            log.debug("the model's own code fails: %s: %s", type(error).__name__, error)
            return ""
        shares = not may_write_parameters(reference.model)
        twin = copy_model(source, share_parameters=shares, share=[self])  # whose quantizers no other thread uses
        for quantizer in twin.modules():
            if isinstance(quantizer, Quantizer):
                quantizer.use_quant = quantizer.observing = False
        found: str | None
        try:
            with undisturbed_outer_state(source):
                found = outcome_of(twin, cloned(call), buffers_of(twin, reference.model)).difference(expected)
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        return found if found is not None and reference.repeats(cloned(call), expected, randomness) else ""
