"""How each tool gets from a float model to the file that keeps a loss. One function per tool, given the same samples.

A function returns what is judged: a file for ONNX Runtime, or a module that simulates; and what the tool says.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compress_cases import Case

from sparsebit.compress.judging.metrics import Metric, PerSample, WholeSet, inputs_of, read_metric
from sparsebit.compress.judging.runtime_model import RuntimeModel
from sparsebit.compress.networks.bench import example_of

MAX_LOSS, BYTES = 0.5, 0.12  # points; share of the float file


@dataclass(frozen=True)
class Found:
    """`file` or `module`: what came out. `says`: the tool's own account."""

    says: str
    file: Path | None = None
    module: Any = None


def sparsebit(case: Case, folder: Path, minutes: float) -> Found:
    return _compress(case, folder, minutes, max_loss=MAX_LOSS)


def sparsebit_bytes(case: Case, folder: Path, minutes: float) -> Found:
    return _compress(case, folder, minutes, budget={"bytes": BYTES})


def _compress(case: Case, folder: Path, minutes: float, **goal: Any) -> Found:
    from sparsebit import compress

    made = compress(
        case.model,
        case.calibration,
        folder=folder / "run",
        metric=case.metric,
        validation=case.validation,
        minutes=minutes,
        **goal,
    )
    return Found(f"{len(made.steps)} candidates; {made}", made.file)


def by_hand(case: Case, folder: Path, minutes: float) -> Found:
    """What the tables of the documentation found best for speed: clipped ranges, and a placement that is measured."""
    from sparsebit import quantize
    from sparsebit.quantization import parse_qconfig

    del minutes
    config = parse_qconfig("onnxruntime").replace("A.OBSERVER.TYPE", "mse")
    qmodel = quantize(case.model, case.calibration, config, placement="measured", placement_seconds=90)
    return Found("observer mse, measured placement", _exported(qmodel, case, folder))


def uniform_four_bits(case: Case, folder: Path, minutes: float) -> Found:
    """Every weight in 4 bits, rounded to nearest; activations are float, as ONNX Runtime wants it beside 4 bits."""
    from sparsebit import quantize
    from sparsebit.quantization import parse_qconfig

    del minutes
    config = parse_qconfig("onnxruntime").replace("A.QUANTIZER.DISABLE", True, "W.QUANTIZER.BIT", 4)
    qmodel = quantize(case.model, case.calibration, config)
    return Found("4-bit weights, rounded to nearest", _exported(qmodel, case, folder))


def _exported(qmodel: Any, case: Case, folder: Path) -> Path:
    example, file = example_of(case.model, case.calibration), folder / "model.onnx"
    qmodel.export_onnx(example.batch, file, dynamic_axes=example.axes)
    return file


def nncf(case: Case, folder: Path, minutes: float) -> Found:
    """`quantize_with_accuracy_control` on the float ONNX file."""
    import nncf as tool
    import onnx

    del minutes
    tool.set_log_level(logging.ERROR)
    floating, wanted = folder / "float.onnx", _run(case, case.model, case.calibration[0])
    write_float(case, floating)
    made = folder / "trial.onnx"
    pieces = case.validation if isinstance(case.metric, WholeSet) else _single_rows(case.validation)

    def validate(model: Any, _: Any) -> tuple[float, None]:
        onnx.save(model, made)
        return total(case, RuntimeModel(made, "onnxruntime", case.model, wanted), case.validation), None

    quantized = tool.quantize_with_accuracy_control(
        onnx.load(floating),
        tool.Dataset(case.calibration, lambda batch: _feeds(case, batch)),
        tool.Dataset(pieces, lambda batch: _feeds(case, batch)),
        validate,
        max_drop=MAX_LOSS,
        drop_type=tool.DropType.ABSOLUTE,
        model_type=tool.ModelType.TRANSFORMER if case.has_transformer else None,
        subset_size=len(case.calibration),
    )
    file = folder / "model.onnx"
    onnx.save(quantized, file)
    names = [node.op_type for node in quantized.graph.node]
    return Found(f"{names.count('QuantizeLinear')} QuantizeLinear nodes", file)


def neural_compressor(case: Case, folder: Path, minutes: float) -> Found:
    """`autotune` over its static and smoothing configurations; the result is a torch module."""
    from neural_compressor.common.base_tuning import TuningConfig
    from neural_compressor.torch.export import export
    from neural_compressor.torch.quantization import INT8StaticQuantConfig, autotune

    del folder, minutes
    start = total(case, case.model, case.validation)
    args, kwargs = inputs_of(case.calibration[0], case.model)
    config = TuningConfig(
        config_set=[INT8StaticQuantConfig(w_granularity="per_channel"), INT8StaticQuantConfig(act_sym=True)],
        tolerable_loss=MAX_LOSS / start,
    )

    def calibrate(model: Any) -> None:
        for batch in case.calibration:
            positional, named = inputs_of(batch, case.model)
            model(*positional, **named)

    inputs = args or tuple(kwargs.values())
    free = tuple({0: torch.export.Dim.AUTO} for _ in inputs)  # batches of any size
    found = autotune(
        export(case.model, inputs, dynamic_shapes=free),
        config,
        lambda model: total(case, model, case.validation),
        run_fn=calibrate,
        example_inputs=args or kwargs,
    )
    return Found("no configuration kept the loss" if found is None else "kept the loss", module=found)


Tool = Callable[[Case, Path, float], Found]
TOOLS: dict[str, Tool] = {
    "sparsebit": sparsebit,
    "by hand": by_hand,
    "nncf": nncf,
    "neural-compressor": neural_compressor,
    "sparsebit bytes": sparsebit_bytes,
    "uniform 4 bits": uniform_four_bits,
}


def write_float(case: Case, file: Path) -> None:
    """The float file that the peers start from, with a free batch size, and free lengths of sentences."""
    from sparsebit.compress.networks.bench import write_float as write

    write(case.model, example_of(case.model, case.calibration), file)


def measured(case: Case) -> Metric:
    """The metric in the form that judges."""
    return read_metric(case.metric, _run(case, case.model, case.unseen[0]), case.unseen[0])


def total(case: Case, model: Any, batches: list[Any]) -> float:
    """The metric on these batches, in points."""
    outputs, metric = [_run(case, model, batch) for batch in batches], measured(case)
    if isinstance(metric, WholeSet):
        return metric.function(outputs, batches)
    assert isinstance(metric, PerSample)
    scores = [metric.scores(found, batch, None) for found, batch in zip(outputs, batches, strict=True)]
    return 100 * float(torch.cat(scores).double().mean())


@torch.no_grad()
def _run(case: Case, model: Any, batch: Any) -> Any:
    args, kwargs = inputs_of(batch, case.model)
    return model(*args, **kwargs)


def _feeds(case: Case, batch: Any) -> dict[str, Any]:
    args, kwargs = inputs_of(batch, case.model)
    bound = inspect.signature(case.model.forward).bind(*args, **kwargs).arguments
    return {name: value.numpy() for name, value in bound.items() if isinstance(value, torch.Tensor)}


def _single_rows(batches: list[Any]) -> list[Any]:
    """NNCF ranks layers by single samples."""
    return [tuple(part[row : row + 1] for part in batch) for batch in batches for row in range(len(batch[0]))]
