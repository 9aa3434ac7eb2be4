"""`verify_training`: compares the gradients of one step with those of the model's own code.

Equal outputs do not imply equal gradients: a captured `detach`, a custom backward or a write through `.data` shows only
here. Works like `Proof`: the smallest modules that differ run their own code, then the step is compared again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import CaptureError
from sparsebit.execution.batches import Call, as_call, to_device
from sparsebit.graph.checking.outcome import (
    Outcome,
    Randomness,
    state_kept,
    tensor_at,
    undisturbed_randomness,
    with_gradients,
)
from sparsebit.graph.checking.verification import Reference
from sparsebit.graph.nodes.hidden_writes import may_write_parameters
from sparsebit.graph.values.copying import copy_model
from sparsebit.graph.values.nested import tensors_of
from sparsebit.numerics.full_float32 import full_float32
from sparsebit.quantization.faithful.cutting import ATTEMPTS, Difference, cut, has_one_mode
from sparsebit.quantization.faithful.simulation import SimulatedModel, folded_tensors
from sparsebit.records import GradientCheck


@full_float32()
def verify_training(qmodel: SimulatedModel, batch: Any, loss: Callable[[Any], Tensor]) -> GradientCheck:
    """Compare the gradients of one step, with quantization off, with those of the model's own code.

    `batch` as for calibration; `loss` returns a scalar for the model's output. The gradients of inputs and of
    parameters are compared, in train mode (in eval mode if batch norms are folded or a branch on `qmodel.training` was
    captured). The smallest module that differs runs its own code from then on; in a calibrated model, which cannot
    be captured again, it is an error that names the module.
    """
    model = qmodel.original
    if not qmodel.has_built_weights:
        raise CaptureError("verify_training() after the weights have changed: nothing to compare with; call it before")
    call = to_device(as_call(batch, model), qmodel.device)
    randomness, cuts, found = Randomness.now(), dict(qmodel.blueprint.policy.own_code), ""
    for _ in range(ATTEMPTS):
        reference = Reference(model, qmodel.device, training=not has_one_mode(qmodel))
        expected = reference.gradients(call, loss, randomness)
        outcome = _gradients(qmodel, call, loss, reference.training, randomness)
        differs, names = outcome.difference(expected), expected.gradients.keys() & outcome.gradients.keys()
        if differs is None:
            randomness.restore()
            new = {path: why for path, why in qmodel.blueprint.policy.own_code.items() if path not in cuts}
            return GradientCheck(tuple(names), tuple(sorted(expected.gradients.keys() - names)), new)
        found = differs
        difference = Difference(qmodel, call, found, reference, randomness, _module_gradients)
        if any(quantizer.is_calibrated for quantizer in qmodel.quantizers()):
            where = "; ".join(f"{path or 'the model'}: {why}" for path, why in difference.by_module().items())
            remedy = "call verify_training() before calibration: such a module then runs its own code"
            raise CaptureError(f"gradients of the copy differ from the model's own, in {where}; {remedy}")
        cut(difference)
    raise CaptureError(f"gradients of the copy differ from the model's own, whatever runs its own code: {found}")


def _gradients(
    qmodel: SimulatedModel, call: Call, loss: Callable[[Any], Tensor], training: bool, randomness: Randomness
) -> Outcome:
    """The copy's outcome, with quantization off; a weight with a folded norm has no gradient to compare."""
    same = {name: twin for name, (_, twin) in _same_parameters(qmodel.original, qmodel).items()}
    switches, was_training = (qmodel.is_quantized("weight"), qmodel.is_quantized("activation")), qmodel.training
    with undisturbed_randomness(randomness), state_kept(qmodel.model, qmodel.source):
        qmodel.set_quant(w_quant=False, a_quant=False)
        qmodel.train(training)
        try:
            return with_gradients(functools.partial(SimulatedModel.forward, qmodel), call, loss, same)
        finally:
            qmodel.train(was_training)
            qmodel.set_quant(*switches)


def _module_gradients(module: nn.Module, part: nn.Module, call: Call) -> str | None:
    """The difference of the gradients of a module and its stand-in, for one random direction of their output."""

    def directional(output: Any) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        floats = [x for x in tensors_of(output) if x.is_floating_point() and x.requires_grad]
        return sum(((x * torch.randn(x.shape, generator=generator).to(x)).sum() for x in floats), torch.zeros(()))

    assert isinstance(part, SimulatedModel)
    own = copy_model(module, share_parameters=not may_write_parameters(module)).train(part.training)
    pairs, randomness = _same_parameters(own, part), Randomness.now()
    expected = with_gradients(own, call, directional, {name: parameter for name, (parameter, _) in pairs.items()})
    randomness.restore()
    twins = {name: twin for name, (_, twin) in pairs.items()}
    return with_gradients(part, call, directional, twins).difference(expected)


def _same_parameters(model: nn.Module, copied: SimulatedModel) -> dict[str, tuple[Tensor, Tensor]]:
    """The model's parameters and the copy's, by name, except where folding changed or removed the copy's."""
    folded = folded_tensors(copied)
    pairs = {name: (parameter, tensor_at(copied.source, name)) for name, parameter in model.named_parameters()}
    return {
        name: (parameter, twin)
        for name, (parameter, twin) in pairs.items()
        if twin is not None and id(twin) not in folded and torch.equal(twin, parameter.to(twin.device))
    }
