"""`Proof`: the part of a `QuantModel` that compares it with the model's own code before it is trusted.

Tracing cannot be right for all Python code, so no graph is trusted without a comparison on real data. `proved` runs the
original and the copy (quantization off) on the same inputs, random numbers and state. If they differ, `cut` lets the
smallest wrong modules run their own code, and the comparison starts again, at most `ATTEMPTS` times. If that does
not settle it, `qmodel.unproved` says why, and coverage reports it.

Differences that are not the graph's fault are recognized in `is_harmless` (state of earlier calls, amplified rounding)
and by running the original twice (code that is not deterministic). Comparing must not change anything: inputs, random
numbers, and, with `keep_state`, buffers and attributes are restored.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparsebit.errors import CaptureError, SparsebitError
from sparsebit.execution.batches import Call, to_device
from sparsebit.graph.checking.outcome import (
    Outcome,
    Randomness,
    buffers_of,
    cloned,
    outcome_of,
    state_kept,
    tensor_at,
    undisturbed_randomness,
)
from sparsebit.graph.checking.verification import Reference, in_double, is_within
from sparsebit.graph.state.outer_state import OuterState, undisturbed_outer_state
from sparsebit.graph.values.comparison import difference
from sparsebit.graph.values.copying import copy_model
from sparsebit.graph.values.nested import tensors_of
from sparsebit.numerics.full_float32 import full_float32
from sparsebit.quantization.building.stages import name_of
from sparsebit.quantization.faithful.carried_state import twin_at
from sparsebit.quantization.faithful.cutting import ATTEMPTS, Difference, captured_part, cut, has_one_mode
from sparsebit.quantization.faithful.simulation import SimulatedModel, folded_tensors
from sparsebit.quantization.ops.quant_opr import QIdentity, QuantOpr

log = logging.getLogger(__name__)

Verify = bool | Literal["calibration"]


class Proof:
    """Compares a QuantModel, with quantization off, with its original model: on `example_inputs` (without any, on the
    inputs of the first call) and on the first calibration batch, in values, dtypes, shapes and writes into inputs and
    buffers.

    The smallest module that differs runs its own code from then on; one that differs even so is left untouched, in
    float. `coverage` names it. `verify="calibration"` skips the example and the first call; `verify=False` skips
    all comparisons, and with each a forward of the float model.
    """

    def __init__(self, qmodel: SimulatedModel) -> None:
        self.qmodel = qmodel
        self.verifies: Verify = False
        self.is_due = False  # whether the next calibration batch has to be compared
        self.first_call_is_due = False

    def begin(self, verify: Verify, example: Call | None) -> None:
        """The model is built; `example`: the call that it was captured with."""
        self.verifies = verify
        if not verify:
            self.qmodel.unproved = "verify=False: the copy was not compared with the model's own code"
        elif verify != "calibration" and example is not None:
            call = to_device(example, self.qmodel.device)
            if not any(tensor.is_meta for tensor in tensors_of(call)):
                with torch.no_grad(), undisturbed_randomness():
                    self.proved(cloned(call), "example_inputs", self.plain_forward, keep_state=True)
        self.first_call_is_due = verify is True and example is None

    def calibration_begins(self) -> None:
        self.is_due, self.first_call_is_due = bool(self.verifies), False

    def plain_forward(self, *args: Any, **kwargs: Any) -> Any:
        """A forward that is not compared, and has no fused steps."""
        return SimulatedModel.forward(self.qmodel, *args, **kwargs)

    def verified(self, call: Call, occasion: str, run: Callable[..., Any]) -> Any:
        """The result of `run` for `call`, proved equal to the original's; parts that differ are cut out."""
        outcome = self.proved(call, occasion, run)
        return run(*call[0], **call[1]) if outcome is None else outcome.output

    @full_float32()
    def proved(self, call: Call, occasion: str, run: Callable[..., Any], *, keep_state: bool = False) -> Outcome | None:
        """The copy's outcome for `call`, proved equal to the original's; None if it did not run, or failed.

        `keep_state`: restore the copy's buffers and attributes afterwards.
        """
        qmodel, self.is_due = self.qmodel, False
        if qmodel.built.root is not None and qmodel.built.root.bind(*call) is None:
            qmodel.capture_again(*call)
            self.is_due = False  # capturing restarts calibration, which made the next batch due; this one is it
        if reason := self.why_not_comparable():
            log.info("%s is not compared with the model's own code: %s", occasion, reason)
            return None
        given, randomness = cloned(call), Randomness.now()
        reference = self.reference()
        try:
            expected = reference.outcome(cloned(call), randomness)
        except Exception as error:  # the copy's forward raises it for the user
            log.debug("the model's own code fails on %s: %s: %s", occasion, type(error).__name__, error)
            return None
        outcome: Outcome | None = None
        outside = OuterState(qmodel.source.modules(), {})
        repeats = True
        for attempt in range(ATTEMPTS):
            found, outcome = self._compare(call, run, expected, keep_state)
            if found is None or (outcome is not None and is_harmless(qmodel, given, expected, randomness)):
                log.info("the copy computes what the model's own code computes on %s", occasion)
                break
            # The causes of a difference that no cut can remove: a user's transform, a user's op, code that is not
            # deterministic. After that the smallest differing modules run their own code, and the loop compares again.
            if qmodel.blueprint.transforms:
                names = ", ".join(map(name_of, qmodel.blueprint.transforms))
                raise CaptureError(
                    f"after the transforms {names} the model computes something else on {occasion}: {found}; only with "
                    "verify=False may a transform change what the graph computes"
                )
            if registered := self._registered_ops():
                qmodel.unproved = f"with ops that you registered ({registered}) the copy differs on {occasion}: {found}"
                break
            if not repeats or not reference.repeats(cloned(given), expected, randomness):
                qmodel.unproved = f"the model's own code returns another result when {occasion} runs again: {found}"
                if not repeats or outcome is None or "" in qmodel.built.captured.untraced:
                    break
                repeats = False  # a graph would return one of its results at every call, so its own code has to run
            elif attempt == ATTEMPTS - 1:
                qmodel.unproved = f"the copy differs from the model's own code on {occasion}: {found}"
                warnings.warn(f"{qmodel.unproved}; what it computes is not what the model computes", stacklevel=5)
                break
            cut(Difference(qmodel, given, found, reference, randomness))
            self.is_due = False
            _put_back(call, given)
            outside.restore()
            randomness.restore()
        if keep_state:  # restoring parameters that the forward wrote into has increased their version counters
            qmodel.note_weights()
        return outcome

    def reference(self, path: str = "") -> Reference:
        """The own code of the original's module at `path`, in the current modes of the copy's modules."""
        qmodel = self.qmodel
        module = qmodel.original.get_submodule(path)
        prefix = f"{path}." if path else ""
        paths = {name: f"{prefix}{name}" if name else path for name, _ in module.named_modules()}
        twins = {name: twin_at(qmodel.source, where) for name, where in paths.items()}
        modes = {name: twin.training for name, twin in twins.items() if twin is not None}
        return Reference(module, qmodel.device, training=modes.get("", qmodel.training), modes=modes)

    def why_not_comparable(self, path: str = "") -> str:
        """Why the original's module at `path` may differ from the copy's without a fault; "" if it may not."""
        qmodel = self.qmodel
        if not qmodel.has_built_weights:
            return "the weights have changed since the model was captured"
        if not self._has_equal_buffers(path):
            return "the buffers have changed since the model was captured"
        if any(is_within(module, path) for module, _ in qmodel.built_state.changes()):
            return "attributes have changed since the model was captured"
        if qmodel.training and has_one_mode(qmodel):
            return "in train mode folded batch norms and captured eval branches differ from it by design"
        return ""

    def _has_equal_buffers(self, path: str) -> bool:
        """Whether the original's buffers below `path` equal the copy's; those of folded norms do not count."""
        folded = folded_tensors(self.qmodel)
        buffers = self.qmodel.original.get_submodule(path).named_buffers(prefix=path)
        pairs = [(buffer, tensor_at(self.qmodel.source, name)) for name, buffer in buffers]
        return all(
            torch.equal(twin, buffer.to(twin))
            for buffer, twin in pairs
            if twin is not None and id(twin) not in folded and twin.shape == buffer.shape and not twin.is_sparse
        )

    def _registered_ops(self) -> str:
        """The ops of the model that users registered: their results may differ on purpose."""
        ops = (part for part in self.qmodel.model.modules() if isinstance(part, QuantOpr))
        registered = (op for op in ops if not isinstance(op, QIdentity) and op.row.implementation is not None)
        return ", ".join(sorted({type(op).__name__ for op in registered}))

    def _compare(
        self, call: Call, run: Callable[..., Any], expected: Outcome, keep_state: bool
    ) -> tuple[str | None, Outcome | None]:
        """The difference, and the copy's outcome, which is None if it failed."""
        source = self.qmodel.source
        with contextlib.ExitStack() as stack:
            if keep_state:  # effects of the forward on state, in the copy and outside of it, are undone
                stack.enter_context(undisturbed_outer_state(source))
                stack.enter_context(state_kept(self.qmodel.model, source))
            try:
                outcome = outcome_of(run, call, buffers_of(source, self.qmodel.original))
            except SparsebitError:
                raise
            except Exception as error:
                return f"{type(error).__name__}: {error}", None
            return outcome.difference(expected), outcome


@torch.no_grad()
def _put_back(call: Call, given: Call) -> None:
    """Undo a forward's writes into its inputs."""
    for tensor, before in zip(tensors_of(call), tensors_of(given), strict=True):
        if isinstance(tensor, Tensor) and not tensor.is_inference():
            tensor.copy_(before)


# --- differences that are not a fault: state that earlier calls have changed, and rounding that the model amplifies


_DISTURBED_RUNS = 3


def is_harmless(qmodel: SimulatedModel, call: Call, expected: Outcome, randomness: Randomness) -> bool:
    """Whether the copy is right although it differs.

    Either earlier calls have changed a state that it keeps outside of buffers: then a new copy has the expected
    outcome. Or only rounding differs, amplified by the model: then copy and original are the same in float64, and the
    original's own outcome changes when its parameters change by a rounding error.
    """
    model = qmodel.original
    if _agrees_anew(qmodel, copy_model(model), call, randomness):
        return True
    is_double = any(x.dtype == torch.float64 for x in (*model.parameters(), *tensors_of(call)))
    if is_double or not _agrees_anew(qmodel, copy_model(model).double(), in_double(call), randomness):
        return False
    return _amplifies_rounding(qmodel, call, expected, randomness)


def _agrees_anew(qmodel: SimulatedModel, model: nn.Module, call: Call, randomness: Randomness) -> bool:
    """Whether a new copy of the model computes the same as the model's own code."""
    now = Randomness.now()
    try:
        part = captured_part(qmodel, "", model, call)
        expected = Reference(model, qmodel.device, training=qmodel.training).outcome(cloned(call), randomness)
        randomness.restore()
        with undisturbed_outer_state(model):
            outcome = outcome_of(part, cloned(call), buffers_of(part.source, model))
    except Exception as error:
        log.debug("no comparison with a new copy: %s: %s", type(error).__name__, error)
        return False
    finally:
        now.restore()
    return outcome.difference(expected) is None


def _amplifies_rounding(qmodel: SimulatedModel, call: Call, expected: Outcome, randomness: Randomness) -> bool:
    """Whether rounding errors change the outcome; float64 alone proves nothing if code tests its inputs' dtype."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(_DISTURBED_RUNS):
        disturbed = copy_model(qmodel.original)
        with torch.no_grad():
            for parameter in filter(torch.is_floating_point, disturbed.parameters()):
                noise = torch.rand(parameter.shape, generator=generator).to(parameter) - 0.5
                parameter.add_(4 * torch.finfo(parameter.dtype).eps * noise * parameter)
        reference = Reference(disturbed, qmodel.device, training=qmodel.training)
        output = reference.outcome(cloned(call), randomness).output
        if difference(output, expected.output, slack=0.1) is not None:
            return True
    return False
