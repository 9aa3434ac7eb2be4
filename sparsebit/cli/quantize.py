"""`sparsebit quantize`: calibrate a model on data and keep the quantized one as a folder, an ONNX file, or both."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from sparsebit.cli import options
from sparsebit.cli.option_groups import DataOptions, FileOptions, OutputOptions, PlacementOptions, grouped
from sparsebit.cli.output import decibel, facts_table, kilobytes, speaking
from sparsebit.cli.recording import Recording, recording

if TYPE_CHECKING:
    from sparsebit.cli.calibrated_model import Calibrated, Subject
    from sparsebit.cli.onnx_output import Exported
    from sparsebit.config.schema import QuantConfig
    from sparsebit.records import Coverage, RunRecord


@grouped
def quantize(
    model: options.Model,
    output: Annotated[
        list[Path],
        typer.Option(
            "--output",
            "-o",
            metavar="DIR|FILE.onnx",
            help="A folder to load again, or an ONNX file for the runtime (twice: both); an older result is replaced.",
        ),
    ],
    data: options.CalibrationData = None,
    config: options.Config = "onnxruntime",
    model_args: options.ModelArgs = None,
    weights: options.Weights = None,
    asym: options.Asym = False,
    effort: options.Effort = None,
    resume: options.Resume = None,
    device: options.Device = None,
    placed: PlacementOptions = PlacementOptions(),
    how: DataOptions = DataOptions(),
    written: FileOptions = FileOptions(),
    said: OutputOptions = OutputOptions(),
) -> None:
    """Quantize a model on calibration data and save it.

    The folder holds safetensors and the config; QuantModel.load(DIR, model) reads it. An output that ends in .onnx is
    a file for the runtime; before it is kept it runs there beside the simulation, and one that computes something else
    is an error, and it is timed against the float model. Either appears whole or not at all. Weights alone are
    quantized without data (-c weights-only).

    sparsebit quantize -m torchvision.models:resnet18 -w resnet18.pt -d photos/ --size 224 --resize 256
    --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225 -o resnet18-int8.onnx
    """
    where = read_outputs(output)
    with (
        speaking(as_json=said.json, quiet=said.quiet) as out,
        recording(said.record, "quantize", out) as recorded,
    ):
        from sparsebit.cli.calibrated_model import calibrated, formats, load_subject, read_config, without_data
        from sparsebit.cli.onnx_output import check_names, checked_file, export
        from sparsebit.cli.output_files import checked_target
        from sparsebit.cli.size import weight_size
        from sparsebit.quantization.effort import with_effort
        from sparsebit.quantization.placement_search import PlacementProfile
        from sparsebit.records.json_form import to_plain

        if written.no_check and written.limits:
            raise typer.BadParameter(f"{', '.join(written.limits.given())}: --no-check compares nothing")
        if where.file is None and written.given():
            raise typer.BadParameter(f"{', '.join(written.given())} need an --output that ends in .onnx")
        placed.check(has_data=data is not None)
        qconfig = with_effort(read_config(config, device, model=model), effort)
        if resume is not None and effort is None and not qconfig.ALGORITHMS:
            raise typer.BadParameter(
                f"--resume {resume}: it keeps what ALGORITHMS have finished, and the config names none; name some, or "
                "give --effort good or best"
            )
        folder = None if where.folder is None else checked_target(where.folder)
        file = None if where.file is None else checked_file(where.file, qconfig.BACKEND, written)
        subject, sqnr = None, None
        if data is None:
            _refuse_without_data(qconfig, how, wants_file=file is not None, asym=asym)
            done = without_data(model, model_args, weights, qconfig, recorded)
        else:
            subject = load_subject(model, model_args, weights, data, how)
            recorded.expect(subject.model, model)
            if file is not None:
                check_names(subject, written)
            out.remark(f"calibrating {model} ({formats(qconfig)}) on {subject.data.description}")
            done = calibrated(
                *(subject, qconfig),
                asym=asym,
                placement=placed.placement,
                placement_seconds=placed.placement_seconds,
                resume=resume if qconfig.ALGORITHMS else None,  # an effort may have left nothing to do
            )
            if placed.save_placement is not None:
                done.qmodel.placement.save(placed.save_placement)
            sqnr = subject.first_batch.sqnr_db(done.qmodel, qconfig.DEVICE)
        coverage, weight = done.qmodel.coverage, weight_size(done.qmodel)
        if folder is not None:  # first: it is of use even if the file then fails
            done.qmodel.save(folder)
        exported = None
        if file is not None and subject is not None:
            out.remark(f"writing {where.file}" + ("" if written.no_check else " and running it beside the simulation"))
            exported = export(subject, done.qmodel, file, written, weight.float_bytes)
            for warning in exported.warnings(placement=placed.placement):
                out.warn(warning)
        if recorded:
            recorded.write(_record(model, subject, done, sqnr, exported, recorded))
        before, after = kilobytes(weight.float_bytes), kilobytes(weight.quantized_bytes)
        quantized = f"{coverage.num_weighted_quantized} of {coverage.num_weighted} weighted layers"
        record = {
            "model": model,
            "output": None if where.folder is None else str(where.folder),
            "onnx": None if exported is None else exported.to_dict(),
            "backend": qconfig.BACKEND,
            "num_samples": done.num_samples,
            "seconds": done.seconds,
            "output_sqnr_db": sqnr,
            "weight_bytes": {"float": weight.float_bytes, "quantized": weight.quantized_bytes},
            "coverage": coverage.to_dict(),
            "placement": None if done.qmodel.placement is None else to_plain(done.qmodel.placement, PlacementProfile),
            **recorded.told(),
        }
        facts = {
            "quantized": f"{quantized}, {formats(qconfig)}",
            **_measured(subject, done, sqnr),
            **({} if done.qmodel.placement is None else {"placement": str(done.qmodel.placement)}),
            "weights": f"{before} -> {after} packed, {weight.ratio:.1f}x smaller",
            "parameters": f"{100 * coverage.parameter_fraction:.1f} % of {coverage.num_parameters:,} quantized",
            **({"in float": "\n".join(floats)} if (floats := coverage.sizeable_floats()) else {}),
            **_left_out(coverage),
            **({} if where.folder is None else {"saved": str(where.folder)}),
            **({} if exported is None else exported.facts()),
        }
        out.result(record, *([] if said.quiet else [facts_table(facts)]))


def _record(
    name: str, subject: Subject | None, done: Calibrated, sqnr: float | None, exported: Exported | None, to: Recording
) -> RunRecord:
    """All that is known of the model at the end."""
    from sparsebit.quantization.recording import record
    from sparsebit.records import OutputError

    words = None if subject is None else subject.data.description
    found = [] if exported is None else exported.results(words)
    output = None if subject is None or sqnr is None else OutputError(sqnr, subject.first_batch.num_samples)
    file = None if exported is None else exported.file
    made = record(done.qmodel, *found, output, name=name, file=file, run=to.run, warnings=to.warnings)
    assert made.calibration is not None
    return made.replace(
        calibration=replace(made.calibration, data=words), file=None if exported is None else exported.file_facts()
    )


class Outputs(NamedTuple):
    """Where the result goes."""

    folder: Path | None
    file: Path | None


def read_outputs(paths: list[Path]) -> Outputs:
    """At most one folder and one file, told apart by the ending."""
    files = [path for path in paths if path.name.lower().endswith(".onnx")]
    folders = [path for path in paths if path not in files]
    if len(files) > 1 or len(folders) > 1:
        given = ", ".join(map(str, paths))
        raise typer.BadParameter(
            f"{given}: give one folder, one file that ends in .onnx, or both", param_hint="--output"
        )
    return Outputs(next(iter(folders), None), next(iter(files), None))


def _refuse_without_data(config: QuantConfig, how: DataOptions, *, wants_file: bool, asym: bool) -> None:
    """Data is needed for the ranges of activations, and for the example call that a file is written from."""
    if not config.A.QUANTIZER.DISABLE:
        raise typer.BadParameter(
            "missing: the ranges of activations are found on data; give data, or -c weights-only",
            param_hint="--data",
        )
    if wants_file:
        raise typer.BadParameter(
            "missing: an ONNX file is written from an example call; give data, or save a folder", param_hint="--data"
        )
    if asym:
        raise typer.BadParameter("missing: --asym calibrates on data", param_hint="--data")
    if config.ALGORITHMS:
        names = ", ".join(step.name for step in config.ALGORITHMS)
        raise typer.BadParameter(f"missing: {names} work on data", param_hint="--data")
    how.refuse(("size", "resize", "mean", "std", "gray", "batch_size", "arrays"), "no --data")


def _measured(subject: Subject | None, done: Calibrated, sqnr: float | None) -> dict[str, str]:
    if subject is None or sqnr is None:
        return {"calibrated": f"without data, in {done.seconds:.1f} s"}
    return {
        "calibrated": f"{done.num_samples} samples in {done.seconds:.1f} s",
        "output": f"SQNR {decibel(sqnr)} against float, on the first {subject.first_batch.num_samples} samples",
    }


def _left_out(coverage: Coverage) -> dict[str, str]:
    """What stays float and why, by reason; ops that another op absorbs cost nothing and are left out."""
    reasons = Counter(layer.reason for layer in coverage.float_layers if not layer.reason.startswith("absorbed by"))
    told = [f"{count} x {reason}" if count > 1 else reason for reason, count in reasons.most_common()]
    untraced = [f"{module.path or '(model)'} [{module.module_type}]: {module.reason}" for module in coverage.opaque]
    return {key: "\n".join(lines) for key, lines in (("float", told), ("untraced", untraced)) if lines}
