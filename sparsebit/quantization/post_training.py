"""`quantize`: post-training quantization in one call.

The steps: build a `QuantModel` on the first batch, calibrate it on all batches, measure or apply the placement, run the
`ALGORITHMS` of the config. The order matters: the placement decides which weights are quantized at all, and the
algorithms then round exactly these. The given model is never changed.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from sparsebit.config.reading import Source
from sparsebit.config.schema import QuantConfig
from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.execution.batches import Call, batches_of, calls, num_samples, require_repeatable
from sparsebit.graph.values.inference_mode import ordinary_tensors
from sparsebit.progress import known_length, track
from sparsebit.quantization.algorithms.registration import apply_algorithms
from sparsebit.quantization.effort import Effort, with_effort
from sparsebit.quantization.model.quant_model import QuantModel
from sparsebit.quantization.placement_search import PlacementProfile, apply_placement, measure_placement
from sparsebit.quantization.quant_config import as_qconfig
from sparsebit.records.phases import note_calibration, phase

log = logging.getLogger(__name__)

# With fewer samples, the extremes of single samples set the ranges of all activations, which is worth a warning.
FEWEST_SAMPLES = 8


@ordinary_tensors()
def quantize(
    model: nn.Module,
    batches: Iterable[Any] | None = None,
    config: Source | QuantConfig = "onnxruntime",
    *,
    asym: bool = False,
    effort: Effort | None = None,
    resume: str | os.PathLike[str] | None = None,
    placement: PlacementProfile | str | os.PathLike[str] = "default",
    placement_seconds: float = 60.0,
) -> QuantModel:
    """A calibrated `QuantModel` with quantization on, in eval mode; `model` is not changed.

    `batches`: an iterable of tensors, tuples of positional arguments or mappings of keyword arguments (a DataLoader of
    `(images, labels)` also works). None if only weights are quantized (`config="weights-only"`): their ranges are
    computed from the weights themselves. `config`: a config in any form that `parse_qconfig` reads, or a backend's name
    (8 bits in that runtime's formats). `asym`: calibrate each layer on quantized predecessors. `effort`: "fast"
    (calibration alone), "good" (GPTQ, seconds) or "best" (then the whole network is trained, minutes to an hour),
    instead of the config's `ALGORITHMS`. `resume`: a folder that keeps their finished work; a run that was killed
    continues after it.

    `placement`: which layers run in integers. "default": as in the backend's profile. "measured": the fastest choice
    in the runtime on this machine that keeps the accuracy, never slower than float, found in about `placement_seconds`;
    `qmodel.placement` holds the measurements. A saved profile, or its file: the choice made then.

    >>> model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    >>> qmodel = quantize(model, [torch.randn(8, 4)], "onnxruntime")
    >>> print(str(qmodel.coverage).splitlines()[0])
    1 of 1 weighted layers quantized, 1 layers in all
    >>> small = quantize(model, config="weights-only")
    """
    qconfig = with_effort(as_qconfig(config), effort)
    if resume is not None and effort is None and not qconfig.ALGORITHMS:
        raise ConfigError(f"resume={str(resume)!r}: it keeps what ALGORITHMS finish, and the config names none")
    profile = None
    if placement not in ("default", "measured"):  # read before the work, so that a wrong name costs no time
        profile = placement if isinstance(placement, PlacementProfile) else PlacementProfile.load(placement)
    if placement == "measured" and qconfig.without_batchnorm_tuning is not None:
        raise ConfigError(
            "placement='measured': while batch norms are to be tuned they are not folded, and the files that are timed "
            f"would not be the one that is exported; {qconfig.without_batchnorm_tuning}, or leave the placement out"
        )
    if batches is None:
        return _without_data(model, qconfig, "" if placement == "default" else f"placement={str(placement)!r}")
    batches = batches_of(batches)
    if qconfig.ALGORITHMS:
        require_repeatable(batches, "the ALGORITHMS of the config")
    stream = iter(batches)
    first = next(stream, None)
    if first is None:
        raise CalibrationError("no calibration batches were given; a few dozen samples are enough to start with")
    every = calls(itertools.chain([first], stream), model, qconfig.DEVICE)
    qmodel = _calibrated(model, qconfig, first, every, total=known_length(batches), asym=asym)
    if placement == "measured":
        qmodel = measure_placement(qmodel, [first], seconds=placement_seconds).qmodel
    elif profile is not None:
        qmodel = apply_placement(qmodel, profile)
    if qconfig.ALGORITHMS and not qmodel.is_float_by_plan:  # a float model has nothing to round
        apply_algorithms(qmodel, batches, resume=resume)
    return qmodel


def _without_data(model: nn.Module, qconfig: QuantConfig, needs: str) -> QuantModel:
    """Quantize without calibration data. `needs`: the argument of `quantize` that needs data, or an empty string."""
    if qconfig.ALGORITHMS or needs:
        needs = needs or f"the ALGORITHMS of the config ({', '.join(step.name for step in qconfig.ALGORITHMS)})"
        raise CalibrationError(f"no calibration batches were given, and {needs} need some")
    with phase("capture"):
        qmodel = QuantModel(model, qconfig)
    # Ranges that only forwards can show: activations, and weights that the forward computes.
    waiting = [q.name for q in qmodel.quantizers() if not q.fake_fused and q.observed_as == "activation"]
    if waiting:
        shown = ", ".join(waiting[:3]) + (", ..." if len(waiting) > 3 else "")
        remedy = (
            "these weights are computed in the forward, so pass one batch that reaches them"
            if qconfig.A.QUANTIZER.DISABLE
            else 'pass a DataLoader or a list of batches, or quantize weights alone: config="weights-only"'
        )
        raise CalibrationError(
            f"no calibration batches were given, and {len(waiting)} ranges are found on data ({shown}); {remedy}"
        )
    with phase("calibration"):
        qmodel.prepare_calibration(keep_inputs=False)
        qmodel.calc_qparams()
    note_calibration(0, asym=False)
    qmodel.set_quant(w_quant=True, a_quant=True)
    return qmodel


def _calibrated(
    model: nn.Module, qconfig: QuantConfig, first: Any, every: Iterable[Call], *, total: int | None, asym: bool
) -> QuantModel:
    """Build and calibrate. `first`: the batch that the model is captured with; `every`: the calls of all batches,
    including the first.
    """
    with phase("capture"):
        qmodel = QuantModel(model, qconfig, example_inputs=first)
    qmodel.prepare_calibration(keep_inputs=asym)
    with phase("calibration"):
        with torch.no_grad():
            stream = track(every, "calibration", total=total)
            count = sum(num_samples(call, qmodel(*call[0], **call[1])) for call in stream)
        if count < FEWEST_SAMPLES and not qconfig.A.QUANTIZER.DISABLE:
            log.warning(
                "calibrated on %d samples: ranges are only as wide as what these few showed, and other inputs will be "
                "clipped; give a few dozen to a few hundred that look like the data in use",
                count,
            )
        qmodel.calc_qparams(asym=asym)
    note_calibration(count, asym=asym)
    qmodel.set_quant(w_quant=True, a_quant=True)
    return qmodel
