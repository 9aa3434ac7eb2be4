"""`is_no_fault`: which differences between a copy and the model's own code are harmless.

A difference is harmless if earlier calls changed a state, or if the model itself amplifies rounding errors.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from sparsebit.execution.batches import Call
from sparsebit.graph.checking.outcome import Outcome, Randomness, buffers_of, cloned, outcome_of
from sparsebit.graph.checking.verification import Reference, in_double
from sparsebit.graph.state.outer_state import undisturbed_outer_state
from sparsebit.graph.values.comparison import difference
from sparsebit.graph.values.copying import copy_model
from sparsebit.graph.values.nested import tensors_of
from sparsebit.quantization.faithful.cutting import captured_part
from sparsebit.quantization.faithful.simulation import SimulatedModel

log = logging.getLogger(__name__)

_DISTURBED_RUNS = 3


def is_no_fault(qmodel: SimulatedModel, call: Call, expected: Outcome, randomness: Randomness) -> bool:
    """Whether the copy is right although it differs.

    Either earlier calls have changed a state that it keeps outside of buffers: then a new copy has the expected
    outcome. Or only rounding differs, amplified by the model: then copy and original are the same in float64, and the
    original's own outcome changes when its parameters change by a rounding error.
    """
    model = qmodel.original
    if _agrees_anew(qmodel, copy_model(model), call, randomness):
        return True
    if any(x.dtype == torch.float64 for x in (*model.parameters(), *tensors_of(call))):
        return False
    return _agrees_anew(qmodel, copy_model(model).double(), in_double(call), randomness) and _amplifies_rounding(
        qmodel, call, expected, randomness
    )


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
    """Whether rounding errors change the outcome; float64 alone proves nothing if code tests the dtype of its
    inputs.
    """
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
