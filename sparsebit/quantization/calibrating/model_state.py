"""Checks of the model's state for verbs of `QuantModel`, and states that hold inside a `with` block only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from sparsebit.errors import CalibrationError, CaptureError, DeploymentError
from sparsebit.execution.distributed import is_sharded
from sparsebit.quantization.faithful.simulation import SimulatedModel


def require_whole(qmodel: SimulatedModel, verb: str) -> None:
    """Raise if parameters are spread over the ranks, or if a value that the graph holds as a constant has changed."""
    if is_sharded(qmodel):
        raise CalibrationError(
            f"{verb}() on parameters that are spread over the ranks; call it before shard(), or save() the model "
            "on all ranks and go on with QuantModel.load() in one process"
        )
    require_captured_values(qmodel, verb)


def require_captured_values(qmodel: SimulatedModel, verb: str) -> None:
    """Raise if a plain attribute or global that a graph holds as a constant has changed since."""
    for path, region in qmodel.built.captured.regions.items():
        changed = region.frozen_values and region.frozen_values.changed()
        if changed:
            raise CaptureError(
                f"{verb}(): {f'in {path}, ' if path else ''}{changed}, but the graph holds the captured value; "
                "build the QuantModel again, from a float model with the new one"
            )


def require_settled(qmodel: SimulatedModel, verb: str) -> None:
    """Raise if the model is not whole, or is being calibrated."""
    require_whole(qmodel, verb)
    if qmodel.is_calibrating:
        raise CalibrationError(
            f"{verb}() during calibration, which would overwrite it; call it before prepare_calibration() or after "
            "calc_qparams()"
        )


def require_calibrated(qmodel: SimulatedModel, verb: str) -> None:
    """Raise if no quantizer is calibrated."""
    if not any(quantizer.is_calibrated for quantizer in qmodel.quantizers()):
        raise CalibrationError(f"{verb}() needs a calibrated model; call calc_qparams() first")


def check_ready(qmodel: SimulatedModel, verb: str) -> None:
    """Raise if nothing of the model is quantized, or nothing calibrated; `verb` is what the user called."""
    quantizers = [quantizer for quantizer in qmodel.quantizers() if not quantizer.fake_fused]
    if not quantizers and qmodel.is_float_by_plan:
        return  # quantization is switched off on purpose: the file is a float one
    if not quantizers:
        raise DeploymentError(
            f"{verb}(): nothing of the model is quantized with BACKEND: {qmodel.config.BACKEND}; its coverage says why"
        )
    if not any(quantizer.is_calibrated for quantizer in quantizers):
        raise CalibrationError(
            f"{verb}(): the model is not calibrated; call prepare_calibration(), run a few batches, then calc_qparams()"
        )


@contextlib.contextmanager
def switched_on(qmodel: SimulatedModel) -> Iterator[None]:
    """Inside, a calibrated model whose quantization is off is quantized; afterwards its switches are as before."""
    quantizers = [quantizer for quantizer in qmodel.quantizers() if not quantizer.fake_fused]
    switched = [] if any(quantizer.is_enable for quantizer in quantizers) else quantizers
    before = [quantizer.use_quant for quantizer in switched]
    try:
        for quantizer in switched:
            if quantizer.is_calibrated:
                quantizer.use_quant = True
        yield
    finally:
        for quantizer, is_on in zip(switched, before, strict=True):
            quantizer.use_quant = is_on


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, all of `model` is in eval mode; afterwards each module has its own mode again."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
