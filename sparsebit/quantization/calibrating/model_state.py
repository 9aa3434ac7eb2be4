"""Checks that verbs of `QuantModel` make before they begin, and temporary states of a model in a `with` block.

The checks (`require_*`, `check_ready`) raise with the verb's name. The context managers switch quantizers, modes and
parameters (`in_float`: the model computes what the float model computes), and restore them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Iterator

from torch import Tensor, nn

from sparsebit.config.algorithm_steps import BATCHNORM_TUNING
from sparsebit.errors import CalibrationError, CaptureError, DeploymentError
from sparsebit.execution.blocks.find_blocks import whole_graph
from sparsebit.execution.distributed import is_sharded
from sparsebit.graph.rewriting.patterns import is_itself
from sparsebit.quantization.building.float_parameters import FloatParameters
from sparsebit.quantization.faithful.simulation import SimulatedModel
from sparsebit.quantization.ops.quant_opr import WeightedQuantOpr
from sparsebit.quantization.quantizers.base import Quantizer

log = logging.getLogger(__name__)

_WITHOUT_ROUNDING = (BATCHNORM_TUNING, "equalize", "smooth")


def require_whole(qmodel: SimulatedModel, verb: str) -> None:
    """Raise if parameters are spread over the ranks, or if a value that the graph holds as a constant has changed."""
    if is_sharded(qmodel):
        raise CalibrationError(
            f"{verb}() on parameters that are spread over the ranks; call it before shard(), or save and load the model"
        )
    require_captured_values(qmodel, verb)


def require_captured_values(qmodel: SimulatedModel, verb: str) -> None:
    """Raise if a plain attribute or global that a graph holds as a constant has changed since."""
    for path, region in qmodel.built.captured.regions.items():
        changed = region.frozen_values and region.frozen_values.changed()
        if changed:
            found = f"{f'in {path}, ' if path else ''}{changed}, but the graph holds the captured value"
            raise CaptureError(f"{verb}(): {found}; build the QuantModel again")


def require_settled(qmodel: SimulatedModel, verb: str) -> None:
    """Raise if the model is not whole, or is being calibrated."""
    require_whole(qmodel, verb)
    if qmodel.is_calibrating:
        raise CalibrationError(f"{verb}() during calibration, which would overwrite it; call it after calc_qparams()")


def require_calibrated(qmodel: SimulatedModel, verb: str) -> None:
    """Raise if no quantizer is calibrated."""
    if not any(quantizer.is_calibrated for quantizer in qmodel.quantizers()):
        raise CalibrationError(f"{verb}() needs a calibrated model; call calc_qparams() first")


def check_ready(qmodel: SimulatedModel, verb: str) -> None:
    """Raise if the model has no quantizers, or none is calibrated; `verb` is the method that the user called."""
    quantizers = [quantizer for quantizer in qmodel.quantizers() if not quantizer.fake_fused]
    if quantizers and not any(quantizer.is_calibrated for quantizer in quantizers):
        raise CalibrationError(
            f"{verb}(): the model is not calibrated; call prepare_calibration(), run a few batches, then calc_qparams()"
        )
    if not quantizers and not qmodel.is_float_by_plan:  # a plan without sites is float on purpose
        raise DeploymentError(
            f"{verb}(): nothing of the model is quantized with BACKEND: {qmodel.config.BACKEND}; its coverage says why"
        )


def quantizers_of(*modules: nn.Module) -> list[Quantizer]:
    """Every quantizer in the modules, each once."""
    parts = dict.fromkeys(part for module in modules for part in module.modules())
    return [part for part in parts if isinstance(part, Quantizer)]


@contextlib.contextmanager
def switched(quantizers: Iterable[Quantizer], to: bool | None = None) -> Iterator[None]:
    """Inside, these quantizers are on or off (`to`; None: unchanged); afterwards each is switched as before."""
    before = {quantizer: quantizer.use_quant for quantizer in quantizers}
    try:
        for quantizer, is_on in before.items():
            quantizer.use_quant = is_on if to is None else to
        yield
    finally:
        for quantizer, is_on in before.items():
            quantizer.use_quant = is_on


@contextlib.contextmanager
def switched_on(qmodel: SimulatedModel) -> Iterator[None]:
    """Inside, a calibrated model whose quantization is off is quantized; afterwards its switches are as before."""
    is_on = any(quantizer.is_enable for quantizer in qmodel.quantizers())
    calibrated = [q for q in qmodel.quantizers() if q.is_calibrated and not q.fake_fused]
    with switched([] if is_on else calibrated, to=True):
        yield


# --- the float model's values of weights and biases that algorithms have changed


@contextlib.contextmanager
def in_float(qmodel: SimulatedModel) -> Iterator[None]:
    """Inside, the model computes the same as the float model: quantization off, the float model's parameters."""
    with switched(qmodel.quantizers()), contextlib.ExitStack() as stack:
        if qmodel.built.root is not None:
            qmodel.float_parameters.drop_outdated(qmodel.built.root.graph_module)
            for block in whole_graph(qmodel.built.root.graph_module):
                stack.enter_context(qmodel.float_parameters.original(block))
        qmodel.set_quant(w_quant=False, a_quant=False)
        yield


def forget_float_parameters(qmodel: SimulatedModel) -> None:
    """Record that the float model's outputs can no longer be computed: its batch norms have new statistics."""
    qmodel.float_parameters = FloatParameters()
    qmodel.float_values_are_lost = True


def warn_if_lost(qmodel: SimulatedModel, consequence: str) -> None:
    """Log a warning if the float model's values are lost, with the consequence."""
    if qmodel.float_values_are_lost:
        changed = "algorithms changed weights of this model, or tuned its batch norms"
        lost = "the saved model does not contain the float model's values"
        log.warning("%s: %s, and %s. Start from the float model", changed, lost, consequence)


def originals_of(qmodel: SimulatedModel, sites: Collection[str]) -> dict[int, Tensor]:
    """By `id`: the float model's values of parameters that algorithms changed, in the layers of these weight sites."""
    modules = qmodel.model.modules()
    layers = [m for m in modules if is_itself(m, WeightedQuantOpr) and m.weight_quantizer.name in sites]
    rounded = [name for name in qmodel.applied_algorithms if name not in _WITHOUT_ROUNDING]
    if qmodel.float_values_are_lost and layers and rounded:
        names = ", ".join(layer.weight_quantizer.name for layer in layers)
        lost = "a saved model has no float values to restore. Start from the float model"
        log.warning("%s: keeps the weights that %s rounded, as %s", names, ", ".join(rounded), lost)
    if qmodel.built.root is None:
        return {}
    theirs = {id(parameter) for layer in layers for parameter in layer.op.parameters()}
    changed = qmodel.float_parameters.changed(qmodel.built.root.graph_module)
    return {id(parameter): value for parameter, value in changed if id(parameter) in theirs}
