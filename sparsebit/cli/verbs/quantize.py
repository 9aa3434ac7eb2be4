"""`sparsebit quantize`: calibrate a model on data and save it as a folder, an ONNX file, or both.

All checks of options and outputs come before the calibration, which may take long. `_Made` holds the results and words
them for the table, for `--json` and for a record. The folder is saved first, because it is useful even if the ONNX file
then fails its comparison.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from sparsebit.cli.inputs.accuracy import Accuracy, Scores
from sparsebit.cli.inputs.calibrated_model import (
    Calibrated,
    Subject,
    calibrated,
    formats,
    load_subject,
    read_config,
    without_data,
)
from sparsebit.cli.inputs.data import Inputs, fitting
from sparsebit.cli.inputs.loading import load_net, weights_source
from sparsebit.cli.inputs.scoring import load_test
from sparsebit.cli.option_groups import TrainedModel, retyped
from sparsebit.cli.options import refuse
from sparsebit.cli.outputs.onnx_output import FILE_ENDINGS, Exported, check_names, checked_file, export, scored_file
from sparsebit.cli.outputs.output import Output, decibel, facts_table, kilobytes
from sparsebit.cli.outputs.output_files import checked_target
from sparsebit.cli.outputs.output_names import check_folder_name
from sparsebit.cli.outputs.recording import Recording
from sparsebit.cli.outputs.size import WeightSize, weight_size
from sparsebit.cli.verb_options import QuantizeOptions
from sparsebit.config.schema import QuantConfig
from sparsebit.deploy.runtimes import owner_of
from sparsebit.quantization.effort import with_effort
from sparsebit.quantization.placement_search import PlacementProfile
from sparsebit.quantization.recording import record
from sparsebit.records import Coverage, OutputError, RunRecord
from sparsebit.records.json_form import to_plain


def quantize(asked: QuantizeOptions, out: Output, recorded: Recording) -> None:
    """Calibrate, save the folder and the file, score them, and report."""
    where = read_outputs(asked.output)
    net, data, written = asked.net, asked.data, asked.written
    qconfig = with_effort(_config_for(asked, where.file), asked.effort)
    _check(asked, qconfig, where)
    folder = None if where.folder is None else checked_target(where.folder)
    file = None if where.file is None else checked_file(where.file, qconfig.BACKEND, written)
    subject, sqnr = None, None
    if data is None:
        model = load_net(net)
    else:
        subject = load_subject(net, data, fitting(asked.how, data, asked.scored.test_data))
        model = subject.model
    recorded.expect(model, net.model)
    test = load_test(asked.scored, model, model, Inputs.of(model), data, asked.how)
    if subject is None:
        done = without_data(model, qconfig)
    else:
        if file is not None:
            check_names(subject, written)
        out.remark(f"calibrating {net.model} ({formats(qconfig)}) on {subject.data.description}")
        resume = asked.resume if qconfig.ALGORITHMS else None  # with a low effort no algorithm may be left
        done = calibrated(subject, qconfig, asym=asked.asym, placed=asked.placed, resume=resume)
        if asked.placed.save_placement is not None:
            done.qmodel.placement.save(asked.placed.save_placement)
        sqnr = subject.first_batch.sqnr_db(done.qmodel, qconfig.DEVICE)
    weight, exported = weight_size(done.qmodel), None
    if folder is not None:
        done.qmodel.save(folder)
    if file is not None and subject is not None:
        out.remark(f"writing {where.file}" + ("" if written.no_check else " and comparing it with the simulation"))
        exported = export(subject, done.qmodel, file, written, weight.float_bytes)
        for warning in exported.warnings(placement=asked.placed.placement):
            out.warn(warning)
    models = {"float": (model, "cpu"), "simulation": (done.qmodel, qconfig.DEVICE)}
    in_file = {} if test is None or exported is None or written.no_check else scored_file(exported.file, model)
    accuracy = None if test is None else test.run({**models, **in_file}, calibrated=True)
    made = _Made(subject, done, sqnr, weight, exported, accuracy)
    if recorded:
        recorded.write(made.recorded(net.model, recorded))
    record = {**made.to_dict(asked.net, where, qconfig), **recorded.values()}
    out.result(record, details=[facts_table(made.facts(where, qconfig))])
    out.next_steps(*_next_steps(asked, where))


class _Made(NamedTuple):
    """The results of the verb."""

    subject: Subject | None
    done: Calibrated
    sqnr: float | None
    weight: WeightSize
    exported: Exported | None
    accuracy: Accuracy | Scores | None

    def to_dict(self, net: TrainedModel, where: Outputs, qconfig: QuantConfig) -> dict[str, Any]:
        placement, weight = self.done.qmodel.placement, self.weight
        return {
            "model": net.model,
            "weights": weights_source(net.model, net.weights),
            "output": where.folder and str(where.folder),
            "onnx": self.exported and self.exported.to_dict(),
            "backend": qconfig.BACKEND,
            "num_samples": self.done.num_samples,
            "seconds": self.done.seconds,
            "output_sqnr_db": self.sqnr,
            "accuracy": self.accuracy and self.accuracy.to_dict(),
            "weight_bytes": {"float": weight.float_bytes, "quantized": weight.quantized_bytes},
            "coverage": self.done.qmodel.coverage.to_dict(),
            "placement": placement and to_plain(placement, PlacementProfile),
        }

    def facts(self, where: Outputs, qconfig: QuantConfig) -> dict[str, str]:
        coverage, placement, weight, subject = (
            self.done.qmodel.coverage,
            self.done.qmodel.placement,
            self.weight,
            self.subject,
        )
        num_quantized = f"{coverage.num_weighted_quantized} of {coverage.num_weighted} weighted layers"
        before, after, took = (
            kilobytes(weight.float_bytes),
            kilobytes(weight.quantized_bytes),
            f"{self.done.seconds:.1f} s",
        )
        output = ""
        if subject is not None and self.sqnr is not None:
            first = subject.first_batch.num_samples
            output = f"SQNR {decibel(self.sqnr)} against float, on the first {first} samples"
        return {
            "quantized": f"{num_quantized}, {formats(qconfig)}",
            "calibrated": f"{self.done.num_samples} samples in {took}" if output else f"without data, in {took}",
            "output": output,
            "accuracy": str(self.accuracy or ""),
            "placement": str(placement or ""),
            "weights": f"{before} -> {after} packed, {weight.ratio:.1f}x smaller",
            "parameters": f"{100 * coverage.parameter_fraction:.1f} % of {coverage.num_parameters:,} quantized",
            "in float": "\n".join(coverage.sizeable_floats()),
            **_left_out(coverage),
            "saved": str(where.folder or ""),
            **({} if self.exported is None else self.exported.facts()),
        }

    def recorded(self, name: str, to: Recording) -> RunRecord:
        """All known facts of the model at the end."""
        subject, exported, output = self.subject, self.exported, None
        if subject is not None and self.sqnr is not None:
            output = OutputError(self.sqnr, subject.first_batch.num_samples)
        words = None if subject is None else subject.data.description
        found, file = ([], None) if exported is None else (exported.results(words), exported.file)
        made = record(self.done.qmodel, *found, output, name=name, file=file, run=to.run, warnings=to.warnings)
        assert made.calibration is not None
        return made.replace(
            calibration=replace(made.calibration, data=words),
            file=exported and exported.file_facts(),
            accuracy=self.accuracy and self.accuracy.facts(),
        )


def _next_steps(asked: QuantizeOptions, where: Outputs) -> list[str]:
    """Commands that show where accuracy was lost, and how the file runs."""
    steps = [f"sparsebit audit {where.file}   # which layers run in integers, and why not"] if where.file else []
    if where.folder is not None and asked.data is not None:
        words = [retyped(asked.net), f"--quantized {where.folder} -d {asked.data}", retyped(asked.how)]
        steps.append(f"sparsebit profile {' '.join(filter(None, words))}   # which layers lose most")
    return steps


class Outputs(NamedTuple):
    """The paths of the results."""

    folder: Path | None
    file: Path | None


def read_outputs(paths: list[Path]) -> Outputs:
    """At most one folder and one file, distinguished by the ending."""
    files = [path for path in paths if path.name.lower().endswith(FILE_ENDINGS)]
    folders = [path for path in paths if path not in files]
    given, is_wrong = ", ".join(map(str, paths)), len(files) > 1 or len(folders) > 1
    refuse({f"{given}: give one folder, one file ({', '.join(FILE_ENDINGS)}), or both": is_wrong}, "--output")
    for folder in folders:
        check_folder_name(folder, instead=f", or a name that ends in {', '.join(FILE_ENDINGS)} for a file")
    return Outputs(next(iter(folders), None), next(iter(files), None))


def _config_for(asked: QuantizeOptions, file: Path | None) -> QuantConfig:
    """The config; one that names no BACKEND, or none at all, is for the runtime of the file's ending."""
    owner = None if file is None else owner_of(file)
    config = read_config(asked.config or owner or "onnxruntime", asked.device, model=asked.net.model)
    if owner is not None and not config.is_set("BACKEND"):
        config = config.replace("BACKEND", owner)
    return config


def _check(asked: QuantizeOptions, config: QuantConfig, where: Outputs) -> None:
    """Raise before the work for options that cannot be used together, or without data."""
    written, resume = asked.written, asked.resume
    of_file, limits = ", ".join(written.given()), ", ".join(written.limits.given())
    has_steps = asked.effort is not None or config.ALGORITHMS
    refuse(
        {
            f"{limits}: --no-check compares nothing": written.no_check and limits,
            f"{of_file} need an --output that is a file": where.file is None and of_file,
        }
    )
    asked.placed.check(has_data=asked.data is not None)
    refuse(
        {f"--resume {resume}: name ALGORITHMS in the config, or give --effort good or best": resume and not has_steps}
    )
    if asked.data is not None:
        return
    steps = ", ".join(step.name for step in config.ALGORITHMS or ())
    # Data is needed for the ranges of activations, and for the example call that a file is written from.
    needed = {
        "the ranges of activations are found on data; give data, or -c weights-only": not config.A.QUANTIZER.DISABLE,
        "a file is written from an example call; give data, or save a folder": where.file is not None,
        "--asym calibrates on data": asked.asym,
        f"{steps} work on data": steps,
    }
    refuse({f"missing: {reason}": is_needed for reason, is_needed in needed.items()}, "--data")
    if asked.scored.test_data is None:
        asked.how.refuse_without_data()


def _left_out(coverage: Coverage) -> dict[str, str]:
    """The float layers by reason; ops that are absorbed by another op cost nothing and are left out."""
    reasons = Counter(layer.reason for layer in coverage.float_layers if not layer.reason.startswith("absorbed by"))
    shown = [f"{count} x {reason}" if count > 1 else reason for reason, count in reasons.most_common()]
    untraced = [f"{module.path or '(model)'} [{module.module_type}]: {module.reason}" for module in coverage.opaque]
    return {"float": "\n".join(shown), "untraced": "\n".join(untraced)}
