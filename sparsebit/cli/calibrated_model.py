"""Shared by `quantize` and `profile`: from names of config, model and data to a calibrated model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from torch import nn

import sparsebit
from sparsebit.cli.data import Data, Inputs, load_data
from sparsebit.cli.first_batch import FirstBatch, run_first_batch
from sparsebit.cli.loading import load_model, resolve, users_code
from sparsebit.cli.option_groups import DataOptions
from sparsebit.cli.options import Arguments
from sparsebit.cli.recording import Recording
from sparsebit.config.rules import format_of
from sparsebit.config.schema import QuantConfig
from sparsebit.errors import ConfigError
from sparsebit.execution.batches import as_call, num_samples_run
from sparsebit.quantization.quant_config import as_qconfig, require_device
from sparsebit.quantization.quant_model import QuantModel


@dataclass(frozen=True)
class Subject:
    """The float model with its data, tried together."""

    model: nn.Module
    data: Data
    first_batch: FirstBatch


@dataclass(frozen=True)
class Calibrated:
    """The quantized model and what calibration took."""

    qmodel: QuantModel
    num_samples: int
    seconds: float


def load_subject(
    model: str, arguments: Arguments | None, weights: Path | None, data: str, options: DataOptions
) -> Subject:
    """The model and the data, and the first batch run through the model."""
    net = load_model(model, arguments, weights)
    batches = load_data(data, options, Inputs.of(net))
    return Subject(net, batches, run_first_batch(net, batches))


def calibrated(
    subject: Subject,
    config: QuantConfig,
    *,
    asym: bool,
    placement: str = "default",
    placement_seconds: float = 60.0,
    resume: Path | None = None,
) -> Calibrated:
    """The model quantized on its data."""
    counted = _Counted(subject)
    start = time.monotonic()
    with users_code("calibration failed", theirs_alone=False):
        qmodel = sparsebit.quantize(
            *(subject.model, counted, config),
            asym=asym,
            resume=resume,
            placement=placement,
            placement_seconds=placement_seconds,
        )
    return Calibrated(qmodel, counted.num_samples, time.monotonic() - start)


class _Counted:
    """The batches, with the samples of the last time that all of them were read."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.num_samples = subject, 0

    def __iter__(self) -> Iterator[Any]:
        num_samples, model = 0, self.subject.model
        for batch in self.subject.data:
            num_samples += num_samples_run(as_call(batch, model), model)
            yield batch
        self.num_samples = num_samples


def without_data(
    model: str, arguments: Arguments | None, weights: Path | None, config: QuantConfig, recorded: Recording
) -> Calibrated:
    """The model with its weights alone quantized: their ranges are read off them."""
    net = load_model(model, arguments, weights)
    recorded.expect(net, model)
    start = time.monotonic()
    with users_code("quantization failed", theirs_alone=False):
        qmodel = sparsebit.quantize(net, config=config)
    return Calibrated(qmodel, 0, time.monotonic() - start)


def read_config(source: str, device: str | None = None, *, model: str | None = None) -> QuantConfig:
    """A config file or a backend's default, on `device` where one is named; a GPU that is not there is an error.

    The module of `model` is imported first: it may register the observers and quantizers that the config names.
    """
    if model is not None:
        resolve(model, "--model")
    config = as_qconfig(source)
    if device is not None:
        config = config.replace("DEVICE", device)
    try:
        require_device(config)
    except ConfigError as fault:
        raise ConfigError(f"{fault}; on the command line, --device cpu goes before the config") from None
    return config


def formats(config: QuantConfig) -> str:
    """`W8 A8 on virtual`: the config in a word."""
    parts = [
        f"{kind}{part.QUANTIZER.BIT if format_of(part) == 'integer' else part.QUANTIZER.TYPE}"
        for kind, part in (("W", config.W), ("A", config.A))
        if not part.QUANTIZER.DISABLE
    ]
    return f"{' '.join(parts) or 'nothing'} on {config.BACKEND}"


def planned(model: str, arguments: Arguments | None, config: str, data: str | None = None) -> QuantModel:
    """The model with its quantizers placed but not calibrated: enough to see the plan, whatever the DEVICE.

    One sample of `data` shows how the model is called, which some models cannot be traced without.
    """
    qconfig, net = read_config(config, "cpu", model=model), load_model(model, arguments)
    if data is None:
        return QuantModel(net, qconfig)
    if Path(data).is_dir():
        raise typer.BadParameter(f"{data} is a folder; name a file or MODULE:FACTORY", param_hint="--data")
    batches = load_data(data, DataOptions(num_samples=1), Inputs.of(net))
    run_first_batch(net, batches)
    return QuantModel(net, qconfig, example_inputs=next(iter(batches)))
