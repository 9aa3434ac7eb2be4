"""`correct_biases`: each layer's bias compensates for the shift of its mean output that quantization causes.

The arithmetic is in `bias_correction_math.py`; this file visits the layers in order, and measures means over all ranks.
"""

from __future__ import annotations

import logging
import os
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import is_parametrized

from sparsebit.errors import CalibrationError
from sparsebit.execution.blocks.engine import BlockData
from sparsebit.execution.blocks.value_store import MIB
from sparsebit.execution.distributed import gather
from sparsebit.numerics.rounding.layer_matrix import LayerMatrix, layer_matrix
from sparsebit.quantization.algorithms.layer_visits import (
    folder_of,
    has_one_input,
    input_of,
    is_first_call,
    num_owners,
)
from sparsebit.quantization.algorithms.registration import register_algorithm
from sparsebit.quantization.algorithms.rounding.bias_correction_math import Means, analytic_shift, empirical_shift
from sparsebit.quantization.model.quant_model import QuantModel
from sparsebit.quantization.ops.quant_opr import WeightedQuantOpr

log = logging.getLogger(__name__)

Method = Literal["empirical", "analytic"]


@register_algorithm("bias_correction")
def correct_biases(
    qmodel: QuantModel,
    data: Any,
    *,
    method: Method = "analytic",
    memory_budget: int = 1024 * MIB,
    resume: str | os.PathLike[str] | None = None,
) -> dict[str, float]:
    """Correct the biases of a calibrated model on `data` (batches as for calibration, no labels), in place.

    `method`: "analytic" is `(W - V) E[x]`, with the mean input of the float model: only the shift caused by rounding
    this layer's weight. It assumes weights rounded to nearest: after `gptq` the difference of the weights is not the
    rounding error. "empirical" compares each layer's output with that of the float model, layer by layer, so that later
    layers see the corrections: the shift caused by weights and activations together. Then every layer's mean is
    that of the float model, but if a residual sum has drifted this can make the whole model worse: compare the two.

    Returns the largest correction of each layer. Layers without a bias are unchanged.
    `resume`: a folder that keeps each finished layer; a run that was killed continues after them.

    >>> correct_biases(qmodel, batches)  # doctest: +SKIP
    {'conv1': 0.031, ...}
    """
    owners = num_owners(qmodel.model)
    found: dict[str, float] = {}

    @torch.no_grad()
    def visit(data: BlockData) -> None:
        (layer,), node, name = data.block.modules.values(), data.block.nodes[0], data.block.name
        if not isinstance(layer, WeightedQuantOpr) or not isinstance(layer.op, (nn.Linear, _ConvNd)):
            return
        bias, form = layer.op._parameters.get("bias"), layer_matrix(layer.op)
        if bias is None or is_parametrized(layer.op, "bias") or owners[id(bias)] > 1 or not is_first_call(node):
            return
        if method == "empirical":
            shift = _measured_shift(layer, data)
        elif form is not None and has_one_input(node):
            shift = _expected_shift(layer, form, data)
        else:
            log.warning("%s: not a plain linear layer or convolution; its bias stays", name)
            return
        if not bool(shift.isfinite().all()):
            raise CalibrationError(f"{name}: its mean input or output is not finite; a batch has NaN or infinity")
        # On a second run the correction replaces the first one: it is relative to the float model's bias.
        kept, path = qmodel.float_parameters, f"{node.target}.op"
        before = kept.get(f"{path}.bias") if method == "analytic" and kept.get(f"{path}.weight") is None else None
        bias.copy_((bias if before is None else before.to(bias)) + shift.to(bias))
        found[name] = float(shift.abs().max())
        log.debug("%s: bias corrected by up to %.4g", name, found[name])

    folder = folder_of(resume, "bias-correction", {"method": method})
    qmodel.visit_blocks(data, visit, blocks="layers", memory_budget=memory_budget, resume=folder)
    log.info("bias correction: %d layers", len(found))
    return found


def _measured_shift(layer: WeightedQuantOpr, data: BlockData) -> Tensor:
    targets, outputs = Means(), Means()
    for batch, (output,) in enumerate(data.outputs()):
        axis = output.ndim - len(layer.op.kernel_size) - 1 if isinstance(layer.op, _ConvNd) else -1
        targets.add(data.targets[batch][0], axis)
        outputs.add(output, axis)
    return empirical_shift(_merged(targets), _merged(outputs))


def _expected_shift(layer: WeightedQuantOpr, form: LayerMatrix, data: BlockData) -> Tensor:
    means, weight = Means(), layer.op.weight
    assert isinstance(weight, Tensor)
    for batch in range(data.num_batches):
        x = input_of(data, data.float_inputs, batch)
        num_samples = 1
        # The patches of the mean image are the means of the images' patches: one image instead of a batch.
        if form.num_dims and x.ndim == form.num_dims + 2:
            num_samples, x = len(x), x.mean(0, keepdim=True)
        for patches in form.patches(x):
            means.add(patches.transpose(1, 2).flatten(0, 1), 0, weight=num_samples)
    mean = _merged(means).value.reshape(form.groups, -1)  # (groups, columns)
    original, rounded = (form.matrix(t.detach()).to(mean) for t in (weight, layer.weight_quantizer(weight)))
    return analytic_shift(original, rounded, mean).flatten()


def _merged(means: Means) -> Means:
    """The means over all processes."""
    merged = Means()
    for state in gather(means.state()):
        merged.merge(Means.from_state(state))
    return merged
