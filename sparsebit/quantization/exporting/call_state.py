"""Whether a model's output depends on earlier calls: a file cannot keep such a state."""

from __future__ import annotations

import contextlib
import logging

import torch

from sparsebit.execution.batches import Call
from sparsebit.graph.checking.outcome import Notes, Randomness, buffers_of, cloned, state_kept, undisturbed_randomness
from sparsebit.graph.state.outer_state import OuterState
from sparsebit.graph.values.comparison import difference
from sparsebit.numerics.full_float32 import full_float32
from sparsebit.quantization.calibrating.model_state import evaluating
from sparsebit.quantization.faithful.carried_state import BuiltState
from sparsebit.quantization.faithful.simulation import SimulatedModel

log = logging.getLogger(__name__)


def state_between_calls(qmodel: SimulatedModel, call: Call) -> list[str]:
    """The names of attributes, buffers and globals that `call` changes, if a second identical call has another output.

    All changes are undone. Changes without an effect on the output (a call counter, a kept attention map) do not
    count.
    """
    source = qmodel.source
    outside = OuterState(source.modules(), {})
    with contextlib.ExitStack() as stack:
        stack.callback(outside.restore)
        for context in (torch.no_grad(), full_float32(), undisturbed_randomness(), state_kept(qmodel.model, source)):
            stack.enter_context(context)
        stack.enter_context(evaluating(qmodel))
        state, notes = BuiltState(qmodel.original, source), Notes(call, buffers_of(source, qmodel.original))
        randomness = Randomness.now()
        try:
            args, kwargs = cloned(call)
            first = qmodel(*args, **kwargs)
            attributes = [f"{path}.{name}".lstrip(".") for path, name in state.changes()]
            changed = [*attributes, *notes.outcome(None).buffers, *filter(None, [outside.changed()])]
            if not changed:
                return []
            randomness.restore()
            args, kwargs = cloned(call)
            second = qmodel(*args, **kwargs)
        except Exception as error:  # the export reports it
            log.debug("the model does not run on the export's inputs: %s: %s", type(error).__name__, error)
            return []
        return changed if difference(second, first) is not None else []
