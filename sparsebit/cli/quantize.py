"""`sparsebit quantize`: calibrate a model on data and keep the quantized one as a folder."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparsebit.cli import options
from sparsebit.cli.output import decibel, kilobytes, speaking

if TYPE_CHECKING:
    from rich.table import Table

    from sparsebit.records import Coverage


def quantize(
    model: options.Model,
    data: options.Data,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="DIR", help="The folder for the result; an older result there is replaced."
        ),
    ],
    config: options.Config = "onnxruntime",
    model_args: options.ModelArgs = None,
    weights: options.Weights = None,
    asym: options.Asym = False,
    device: options.Device = None,
    size: options.ImageSize = None,
    resize: options.Resize = None,
    mean: options.Mean = None,
    std: options.Std = None,
    gray: options.Gray = False,
    batch_size: options.BatchSize = None,
    num_samples: options.NumSamples = 256,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Quantize a model on calibration data and save it.

    The folder holds safetensors and the config; QuantModel.load(DIR, model) reads it. It appears whole or not at all.

    sparsebit quantize -m torchvision.models:resnet18 -w resnet18.pt -c tensorrt -d photos/ --size 224 --resize 256
    --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225 -o resnet18-int8
    """
    with speaking(as_json=json, quiet=quiet) as out:
        from sparsebit.cli.calibrating import calibrated, formats, load_subject, read_config
        from sparsebit.cli.data import DataOptions
        from sparsebit.cli.size import weight_size
        from sparsebit.cli.writing import checked_target, replacing_folder

        target = checked_target(output)
        qconfig = read_config(config, device)
        how = DataOptions(size, resize, mean, std, gray, batch_size, num_samples)
        subject = load_subject(model, model_args, weights, data, how)
        out.remark(f"calibrating {model} ({formats(qconfig)}) on {subject.data.description}")
        done = calibrated(subject, qconfig, asym=asym)
        sqnr = subject.trial.sqnr_db(done.qmodel, qconfig.DEVICE)
        with replacing_folder(target) as folder:
            done.qmodel.save(folder)

        coverage, weight = done.qmodel.coverage, weight_size(done.qmodel)
        before, after = kilobytes(weight.float_bytes), kilobytes(weight.quantized_bytes)
        quantized = f"{coverage.num_weighted_quantized} of {coverage.num_weighted} weighted layers"
        record = {
            "model": model,
            "output": str(output),
            "backend": qconfig.BACKEND,
            "num_samples": done.num_samples,
            "seconds": done.seconds,
            "output_sqnr_db": sqnr,
            "weight_bytes": {"float": weight.float_bytes, "quantized": weight.quantized_bytes},
            "coverage": coverage.to_dict(),
        }
        facts = {
            "quantized": f"{quantized}, {formats(qconfig)}",
            "calibrated": f"{done.num_samples} samples in {done.seconds:.1f} s",
            "output": f"SQNR {decibel(sqnr)} against float, on the first {subject.trial.num_samples} samples",
            "weights": f"{before} -> {after} packed, {weight.ratio:.1f}x smaller",
            **_left_out(coverage),
            "saved": str(output),
        }
        out.result(record, *([] if quiet else [_facts(facts)]))


def _left_out(coverage: Coverage) -> dict[str, str]:
    """What stays float and why, by reason; ops that another op absorbs cost nothing and are not told."""
    reasons = Counter(layer.reason for layer in coverage.float_layers if not layer.reason.startswith("absorbed by"))
    told = [f"{count} x {reason}" if count > 1 else reason for reason, count in reasons.most_common()]
    untraced = [f"{module.path or '(model)'} [{module.module_type}]: {module.reason}" for module in coverage.opaque]
    return {key: "\n".join(lines) for key, lines in (("float", told), ("untraced", untraced)) if lines}


def _facts(facts: dict[str, str]) -> Table:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    for name, fact in facts.items():
        grid.add_row(name, Text(fact))
    return grid
