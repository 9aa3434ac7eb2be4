"""`FirstCalls`: compares the first call of each path through a `QuantModel` with the model's own code.

`Proof` compares the calls that are known in advance: example inputs and the first calibration batch. Two kinds of calls
are only known when they happen: the first call of a model that was built without example inputs, and a call for which a
graph's guard fails, so that the module's own code runs with the copy's quantized, perhaps folded layers. That code may
test `type(layer)` or read a folded norm, and would be wrong without an error; so it is compared once for each form of
call, with quantization off, before it runs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparsebit.errors import CaptureError
from sparsebit.execution.batches import Call
from sparsebit.graph.checking.outcome import Randomness, buffers_of, cloned, outcome_of, undisturbed_randomness
from sparsebit.graph.checking.verification import Reference
from sparsebit.graph.nodes.hidden_writes import may_write_parameters
from sparsebit.graph.nodes.stand_in import without_stand_ins
from sparsebit.graph.region import Region, form_of
from sparsebit.graph.state.outer_state import undisturbed_outer_state
from sparsebit.graph.values.copying import copy_model
from sparsebit.graph.values.nested import is_symbolic, tensors_of
from sparsebit.numerics.full_float32 import full_float32
from sparsebit.quantization.building.build import folds_batchnorm
from sparsebit.quantization.faithful.carried_state import LIKE_THIS
from sparsebit.quantization.faithful.cutting import captured_copy
from sparsebit.quantization.faithful.proof import Proof
from sparsebit.quantization.faithful.simulation import SimulatedModel
from sparsebit.quantization.quantizers.base import Quantizer

log = logging.getLogger(__name__)

_FIRST_CALLS = threading.RLock()
_FORMS = 16  # the most call forms that are compared; each costs a few forwards
# Algorithms that move factors between layers that follow each other on the captured path: on another path, the layer
# that undoes a factor may not run.
_RESCALING = ("equalize", "smooth")


class FirstCalls:
    """Compares the first call, if there were no example inputs, and for every captured module the first calls, each
    of another form, that run its own code instead of its graph.

    Other threads wait for it. A call without real tensors (an export, a compiler) does not count as the first.
    """

    def __init__(self, qmodel: SimulatedModel, proof: Proof) -> None:
        self.qmodel, self.proof = qmodel, proof
        self.compares_sources = True  # whether own code that runs instead of a graph is compared
        self._is_comparing = False
        # (path of the module, form of the call) -> how its own code, run with the copy's layers, differs; "" if equal.
        self.compared_sources: dict[tuple[str, Any], str] = {}

    def watch(self) -> None:
        """Called after the model is captured: from now on its graphs report when own code runs instead of them."""
        self.compared_sources = {}
        for region in self.qmodel.built.captured.regions.values():
            region.before_source = self._before_source

    def verify(self, call: Call) -> None:
        """Compare the copy on the first call's inputs, without side effects: the call itself runs afterwards."""

        def compare() -> None:
            quantizers = self.qmodel.quantizers()
            is_exported = bool(self.qmodel.plan) and not quantizers  # an export replaces them while it runs
            try:
                if not is_exported and not any(q.is_enable or q.is_calibrated for q in quantizers):
                    self.proof.proved(cloned(call), "the first call", self.proof.plain_forward, keep_state=True)
            finally:
                self.proof.first_call_is_due = False

        self._alone(lambda: self.proof.first_call_is_due, call, compare)

    def _before_source(self, region: Region, call: Call) -> None:
        """Called before a module's own code runs instead of its graph: raise if it computes something else."""
        path = next((path for path, known in self.qmodel.built.captured.regions.items() if known is region), None)
        if path is None:  # a graph of an earlier capture, which nothing refers to any more
            return
        where = f"this call{f' of {path}' if path else ''}"
        if rescaled := [name for name in self.qmodel.applied_algorithms if name in _RESCALING]:
            names = f"{', '.join(rescaled)} rescaled layers"
            raise CaptureError(f"{where} takes another path than the captured one, for which {names}; {LIKE_THIS}")
        if not self.compares_sources:
            return
        key = path, form_of({"args": call[0], "kwargs": call[1]})

        def compare() -> None:
            self.compared_sources[key] = self._source_difference(path, region.source, call)

        self._alone(lambda: key not in self.compared_sources and len(self.compared_sources) < _FORMS, call, compare)
        if found := self.compared_sources.get(key):
            raise CaptureError(
                f"the inputs of {where} have another form than the captured ones, and the module's own code, which "
                f"runs for them, computes something else when its layers are quantized or folded: {found}; {LIKE_THIS}"
            )

    def _alone(self, is_due: Callable[[], bool], call: Call, compare: Callable[[], None]) -> None:
        """Run `compare` if it is still due, in one thread at a time, and not inside another comparison."""
        if not is_due() or is_symbolic(tensors_of(call)):
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

    @full_float32()
    def _source_difference(self, path: str, source: nn.Module, call: Call) -> str:
        """How the copy's own code at `path`, with quantization off, differs from the original's code.

        If the original's weights or state have changed since, the same code with plain layers is the reference.
        """
        if not self.proof.why_not_comparable(path):
            reference = self.proof.reference(path)
        else:
            plain = without_stand_ins(copy_model(source, share_parameters=True, share=[self.qmodel]))
            _switch_off(plain)  # `QuantizedParameter`s are inside of layers, so they are still there
            modes = {name: module.training for name, module in plain.named_modules()}
            reference = Reference(plain, self.qmodel.device, training=plain.training, modes=modes)
        found = self._own_code_difference(reference, source, call)
        if not found and folds_batchnorm(self.qmodel.config) and not self.qmodel.has_built_weights:
            found = self._folding_difference(path, call)
        return found

    def _folding_difference(self, path: str, call: Call) -> str:
        """How the own code with folded layers differs from the original's, if batch norms have random numbers.

        With the norms of a new model, which are identities, folding has no effect, and a path that skips a norm or
        runs it twice would look right.
        """
        model = copy_model(self.qmodel.original)
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                _randomize(module)
        twin = captured_copy(self.qmodel, "", model, self.qmodel.built.example, None)
        region = twin.built.captured.regions.get(path)
        if region is None:
            return ""
        reference = Reference(model.get_submodule(path), self.qmodel.device, training=False)
        return self._own_code_difference(reference, region.source.eval(), call)

    def _own_code_difference(self, reference: Reference, source: nn.Module, call: Call) -> str:
        randomness = Randomness.now()
        try:
            expected = reference.outcome(cloned(call), randomness)
        except Exception as error:  # the user's call, which follows, raises it
            log.debug("the model's own code fails: %s: %s", type(error).__name__, error)
            return ""
        shares = not may_write_parameters(reference.model)
        twin = copy_model(source, share_parameters=shares, share=[self.qmodel])  # no other thread uses its quantizers
        _switch_off(twin)
        found: str | None
        try:
            with undisturbed_outer_state(source):
                found = outcome_of(twin, cloned(call), buffers_of(twin, reference.model)).difference(expected)
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        # Code whose own results vary from run to run proves nothing.
        return found if found is not None and reference.repeats(cloned(call), expected, randomness) else ""


def _switch_off(model: nn.Module) -> None:
    for quantizer in model.modules():
        if isinstance(quantizer, Quantizer):
            quantizer.use_quant = quantizer.observing = False


@torch.no_grad()
def _randomize(norm: _BatchNorm) -> None:
    """Set statistics and factors to random numbers that are far from an identity and never zero."""
    for name in ("weight", "bias", "running_mean", "running_var"):
        if getattr(norm, name) is not None:
            getattr(norm, name).uniform_(0.5, 1.5)
