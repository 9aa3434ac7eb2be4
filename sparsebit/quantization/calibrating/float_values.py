"""Access to the float model's values of weights and biases that algorithms have changed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator

from torch import Tensor

from sparsebit.config.algorithm_steps import BATCHNORM_TUNING
from sparsebit.execution.blocks.find_blocks import whole_graph
from sparsebit.graph.rewriting.patterns import is_itself
from sparsebit.quantization.building.float_parameters import FloatParameters
from sparsebit.quantization.faithful.simulation import SimulatedModel
from sparsebit.quantization.ops.quant_opr import WeightedQuantOpr

log = logging.getLogger(__name__)

_WITHOUT_ROUNDING = (BATCHNORM_TUNING, "equalize", "smooth")


@contextlib.contextmanager
def in_float(qmodel: SimulatedModel) -> Iterator[None]:
    """Inside, the model computes the same as the float model: quantization off, the float model's parameters."""
    switches = {quantizer: quantizer.use_quant for quantizer in qmodel.quantizers()}
    with contextlib.ExitStack() as stack:
        if qmodel.built.root is not None:
            qmodel.float_parameters.drop_outdated(qmodel.built.root.graph_module)
            for block in whole_graph(qmodel.built.root.graph_module):
                stack.enter_context(qmodel.float_parameters.original(block))
        try:
            qmodel.set_quant(w_quant=False, a_quant=False)
            yield
        finally:
            for quantizer, is_on in switches.items():
                quantizer.use_quant = is_on


def forget_float_parameters(qmodel: SimulatedModel) -> None:
    """Record that the float model's outputs can no longer be computed: its batch norms have new statistics."""
    qmodel.float_parameters = FloatParameters()
    qmodel.float_values_are_lost = True


def warn_if_lost(qmodel: SimulatedModel, consequence: str) -> None:
    """Log the consequence of the float model's values being lost."""
    if qmodel.float_values_are_lost:
        log.warning(
            "algorithms changed weights of this model before it was saved or pickled, or tuned its batch norms: "
            "the float model's values are not in what was saved, and %s. Start from the float model",
            consequence,
        )


def originals_of(qmodel: SimulatedModel, sites: Collection[str]) -> dict[int, Tensor]:
    """The float model's values of parameters that algorithms changed, of the layers of these weight sites, by `id`."""
    modules = qmodel.model.modules()
    layers = [m for m in modules if is_itself(m, WeightedQuantOpr) and m.weight_quantizer.name in sites]
    rounded = [name for name in qmodel.applied_algorithms if name not in _WITHOUT_ROUNDING]
    if qmodel.float_values_are_lost and layers and rounded:
        log.warning(
            "%s: the float values of what %s rounded are not known any more (a saved model has none), so "
            "these weights stay rounded as they were. Start from the float model",
            *(", ".join(layer.weight_quantizer.name for layer in layers), ", ".join(rounded)),
        )
    if qmodel.built.root is None:
        return {}
    theirs = {id(parameter) for layer in layers for parameter in layer.op.parameters()}
    changed = qmodel.float_parameters.changed(qmodel.built.root.graph_module)
    return {id(parameter): value for parameter, value in changed if id(parameter) in theirs}
