"""The whole flow in one call."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from sparsebit.backends import BACKENDS
from sparsebit.config.reading import Source
from sparsebit.config.schema import QuantConfig
from sparsebit.deploy.runtimes import PROFILES
from sparsebit.errors import CalibrationError
from sparsebit.execution.batches import calls
from sparsebit.quantization.progress import track
from sparsebit.quantization.quant_config import parse_qconfig
from sparsebit.quantization.quant_model import QuantModel


def quantize(
    model: nn.Module,
    batches: Iterable[Any],
    config: Source | QuantConfig = "onnxruntime",
    *,
    asym: bool = False,
    verify: bool = True,
) -> QuantModel:
    """A calibrated `QuantModel` with quantization on, in eval mode; `model` is left as it was.

    `batches`: an iterable of tensors, tuples of positional arguments or mappings of keyword arguments (a DataLoader of
    `(images, labels)` will do). `config`: a config in any form that `parse_qconfig` reads, or a backend's name (8 bits
    as that runtime wants them). `asym`: calibrate each layer on quantized predecessors. `verify`: compare the copy with
    the model's own code on the first batch, before anything is quantized; what differs runs its own code.

    >>> model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    >>> qmodel = quantize(model, [torch.randn(8, 4)], "onnxruntime")
    >>> print(qmodel.coverage)
    1 of 1 weighted layers quantized, 1 layers in all
      float    1: absorbed by 0
    """
    qconfig = as_qconfig(config)
    if isinstance(batches, (torch.Tensor, Mapping)):
        batches = [batches]
    if not isinstance(batches, Iterable):
        raise CalibrationError(
            f"calibration data of type {type(batches).__name__} is not iterable; pass a DataLoader or a list of batches"
        )
    stream = iter(batches)
    first = next(stream, None)
    if first is None:
        raise CalibrationError("no calibration batches were given; a few dozen samples are enough to start with")
    qmodel = QuantModel(model, qconfig, example_inputs=first, verify="calibration" if verify else False)
    qmodel.prepare_calibration(keep_inputs=asym)
    with torch.no_grad():
        for args, kwargs in track(calls(itertools.chain([first], stream), model, qconfig.DEVICE), "calibration"):
            qmodel(*args, **kwargs)
    qmodel.calc_qparams(asym=asym)
    qmodel.set_quant(w_quant=True, a_quant=True)
    return qmodel


def as_qconfig(config: Source | QuantConfig) -> QuantConfig:
    """A config from whatever names one: a backend's name, a path, a dict, YAML text."""
    if isinstance(config, str) and config.lower() in BACKENDS:
        return parse_qconfig(PROFILES[config.lower()].recommended())
    return parse_qconfig(config)
