"""Loads the config, model and data that the command line names, and returns a calibrated model.

`Subject` is the float model with its data; making one runs the first batch, so that a model and data that do not fit
are an error before any long work. `calibrated` quantizes it; `load_saved` loads a saved one instead; `planned` places
quantizers without calibration, for verbs that only show the plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from torch import nn

import sparsebit
from sparsebit.cli.inputs.data import Data, Inputs, load_data
from sparsebit.cli.inputs.first_batch import FirstBatch, run_first_batch
from sparsebit.cli.inputs.loading import filled, import_model, load_net, make_model, users_code
from sparsebit.cli.option_groups import DataOptions, ModelOptions, PlacementOptions, TrainedModel
from sparsebit.config.rules import format_of
from sparsebit.config.schema import QuantConfig
from sparsebit.errors import CheckpointError, ConfigError
from sparsebit.execution.batches import as_call, num_samples_run
from sparsebit.quantization.calibrating.model_state import switched
from sparsebit.quantization.model.quant_model import QuantModel
from sparsebit.quantization.quant_config import as_qconfig, require_device


@dataclass(frozen=True)
class Subject:
    """The float model with its data, checked to fit together."""

    model: nn.Module
    data: Data
    first_batch: FirstBatch


@dataclass(frozen=True)
class Calibrated:
    """The quantized model and the cost of calibration."""

    qmodel: QuantModel
    num_samples: int
    seconds: float


def load_subject(source: TrainedModel, data: str, options: DataOptions, *, saved: Path | None = None) -> Subject:
    """Load the model and the data, and run the first batch. `saved`: the folder with its weights."""
    net = load_net(source, saved)
    batches = load_data(data, options, Inputs.of(net))
    return Subject(net, batches, run_first_batch(net, batches))


def calibrated(
    subject: Subject,
    config: QuantConfig,
    *,
    asym: bool = False,
    placed: PlacementOptions = PlacementOptions(),
    resume: Path | None = None,
) -> Calibrated:
    """The model quantized on its data."""
    counted, start = _Counted(subject), time.monotonic()
    how: dict[str, Any] = {"placement": placed.placement, "placement_seconds": placed.placement_seconds}
    with users_code("calibration failed", theirs_alone=False):
        qmodel = sparsebit.quantize(subject.model, counted, config, asym=asym, resume=resume, **how)
    return Calibrated(qmodel, counted.num_samples, time.monotonic() - start)


class _Counted:
    """The batches; counts the samples of the last full pass."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.num_samples = subject, 0

    def __length_hint__(self) -> int:
        return self.subject.data.__length_hint__()

    def __iter__(self) -> Iterator[Any]:
        num_samples, model = 0, self.subject.model
        for batch in self.subject.data:
            num_samples += num_samples_run(as_call(batch, model), model)
            yield batch
        self.num_samples = num_samples


def without_data(net: nn.Module, config: QuantConfig) -> Calibrated:
    """The model with its weights alone quantized: their ranges come from their values."""
    start = time.monotonic()
    with users_code("quantization failed", theirs_alone=False):
        qmodel = sparsebit.quantize(net, config=config)
    return Calibrated(qmodel, 0, time.monotonic() - start)


def load_saved(folder: Path, net: nn.Module, device: str | None = None) -> QuantModel:
    """Load the quantized model of a folder, on `device` if given."""
    try:
        return QuantModel.load(folder, net, device=device)
    except CheckpointError as error:
        if not any(sign in str(error) for sign in ("size mismatch", "differs from that of the model")):
            raise
        hint = f"If {folder} was quantized from a pruned model, give the folder of that too: --weights DIR"
        raise CheckpointError(f"{error}\n{hint}") from None


def scored_models(qmodel: QuantModel) -> dict[str, tuple[Callable[..., Any], str]]:
    """The simulation, and the float model inside of it if no algorithm has changed its weights."""

    def unquantized(*args: Any, **kwargs: Any) -> Any:
        with switched(qmodel.quantizers(), to=False):
            return qmodel(*args, **kwargs)

    device = str(qmodel.device)
    is_changed = qmodel.float_values_are_lost or len(qmodel.float_parameters)
    return {**({} if is_changed else {"float": (unquantized, device)}), "simulation": (qmodel, device)}


def read_config(source: str, device: str | None = None, *, model: str | None = None) -> QuantConfig:
    """A config file or a backend's default, on `device` if given; a missing GPU is an error.

    The module of `model` is imported first: it may register the observers and quantizers that the config names.
    """
    if model is not None:
        import_model(model)
    config = as_qconfig(source)
    if device is not None:
        config = config.replace("DEVICE", device)
    try:
        require_device(config)
    except ConfigError as fault:
        raise ConfigError(f"{fault}; on the command line, --device cpu goes before the config") from None
    return config


def formats(config: QuantConfig) -> str:
    """The config in short: `W8 A8 on virtual`."""
    parts = [
        f"{kind}{part.QUANTIZER.BIT if format_of(part) == 'integer' else part.QUANTIZER.TYPE}"
        for kind, part in (("W", config.W), ("A", config.A))
        if not part.QUANTIZER.DISABLE
    ]
    return f"{' '.join(parts) or 'nothing'} on {config.BACKEND}"


def planned(source: ModelOptions, config: str, data: str | None = None) -> QuantModel:
    """The model with its quantizers placed but not calibrated, which is enough to show the plan. It is on the CPU.

    `data`: its first sample is the example call; some models cannot be traced without one.
    """
    qconfig = read_config(config, "cpu", model=source.model)
    net = make_model(source.model, source.model_args).model  # a plan depends on widths, not on values
    net = (net if source.weights is None else filled(net, source.weights)).eval()
    if data is None:
        return QuantModel(net, qconfig)
    if Path(data).is_dir():
        raise typer.BadParameter(f"{data} is a folder; name a file or MODULE:FACTORY", param_hint="--data")
    batches = load_data(data, DataOptions(num_samples=1), Inputs.of(net))
    run_first_batch(net, batches)
    return QuantModel(net, qconfig, example_inputs=next(iter(batches)))
