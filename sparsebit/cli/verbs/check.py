"""`sparsebit check`: does a runtime compute what an ONNX file says, and how far is that from the float model?

There are four comparisons: the file with itself as written (default), with a float file (`--against`), with the float
model (`--model`), or with the simulation of a saved model (`--model --quantized`). All of them end in a `FileParity`,
whose fault is raised after the result was printed, so that a script sees exit code 1 and the numbers.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table

from sparsebit.cli.inputs.accuracy import Accuracy, Predictor, Scores
from sparsebit.cli.inputs.calibrated_model import load_saved, scored_models
from sparsebit.cli.inputs.data import Inputs, fitting, load_data
from sparsebit.cli.inputs.loading import LoadingError, load_net, refuse_weights
from sparsebit.cli.inputs.onnx_inputs import FileData, inputs_of
from sparsebit.cli.inputs.scoring import load_test
from sparsebit.cli.option_groups import typed
from sparsebit.cli.options import refuse
from sparsebit.cli.outputs.onnx_output import scored_file
from sparsebit.cli.outputs.output import Output, decibel, table
from sparsebit.cli.outputs.recording import Recording
from sparsebit.cli.verb_options import CheckOptions
from sparsebit.deploy.comparing.check import AS_WRITTEN, FileParity, check_against, check_as_written, runtime_of
from sparsebit.deploy.comparing.file_model import FileModel
from sparsebit.deploy.comparing.parity import Parity
from sparsebit.deploy.runtimes import owner_of
from sparsebit.errors import DeploymentError
from sparsebit.quantization.exporting.export_checks import check_parity, compare_model
from sparsebit.quantization.exporting.export_file import check_program
from sparsebit.quantization.model.quant_model import QuantModel
from sparsebit.quantization.recording import file_record
from sparsebit.quantization.recording import record as record_of
from sparsebit.records import ParityCheck


def check(asked: CheckOptions, out: Output, recorded: Recording) -> None:
    """Compare the file with itself, with another file, or with the model, and report."""
    file, against = asked.file, asked.against
    _check(asked)
    chosen = asked.runtime or runtime_of(file)
    qmodel: QuantModel | None = None
    if asked.net.model:
        found, description, qmodel, accuracy = _compare_model(asked, chosen, recorded)
    else:
        recorded.expect_file(file)
        out.remark(f"running {file} in {chosen}, and {against or 'node by node as it is written'}")
        batches = FileData(asked.data, fitting(asked.how, asked.data, asked.scored.test_data), str(file))
        tolerance = asked.limits.tolerance()
        if against is None:
            found = check_as_written(file, batches, chosen, tolerance)
        else:
            found = check_against(file, against, batches, chosen, tolerance if asked.limits else None)
        description, accuracy = batches.description, _score_files(asked, chosen)
    parity, divergence = found.parity, found.divergence
    fault = "; ".join(filter(None, (_fault(found, chosen), *_missed(parity, asked.min_top1))))
    record = {
        **parity.to_dict(),
        "data": description,
        "first_divergence": divergence and asdict(divergence),
        "fault": fault or None,
        "accuracy": accuracy and accuracy.to_dict(),
        **recorded.values(),
    }
    if recorded:
        first = None if divergence is None else str(divergence)
        checked = ParityCheck(parity, fault or None, description, first)
        how: Any = {"run": recorded.run, "warnings": recorded.warnings}
        if qmodel is None:
            made = file_record(file, checked, **how)
        else:
            made = record_of(qmodel, checked, name=asked.net.model, file=file, **how)
        recorded.write(made.replace(accuracy=accuracy and accuracy.facts()))
    out.result(record, _verdict(found), *([str(accuracy)] if accuracy else []), details=[_table(parity)])
    if fault:
        raise DeploymentError(f"{file}: {fault}")


def _check(asked: CheckOptions) -> None:
    """Raise before the work for options that cannot be used together."""
    has_model, saved, against = bool(asked.net.model), asked.saved, asked.against
    of_model = ", ".join([*typed(asked.net), *typed(asked, ["quantized"])])
    refuse(
        {
            "--runtime: with --model the file runs where it was exported for": has_model and asked.runtime is not None,
            "give --quantized DIR or --against FLOAT.onnx": has_model and None not in (asked.quantized, against),
            f"{of_model}: --model is required": not has_model and of_model,
            f"--against {against} is a folder: name the model that it was saved from, --model": (
                not has_model and against is not None and against.is_dir()
            ),
        }
    )
    if has_model and saved is not None and not saved.is_dir():
        option = "--against" if asked.quantized is None else "--quantized"
        raise LoadingError(
            f"{option} {saved}: is not the folder of a saved model; to compare with a file, omit --model"
        )


def _compare_model(
    asked: CheckOptions, runtime: str, recorded: Recording
) -> tuple[FileParity, str, QuantModel | None, Accuracy | Scores | None]:
    """Compare the file with the float model, or with the simulation of the saved one, and score them."""
    file, folder, limits = asked.file, asked.saved, asked.limits
    if folder is not None:
        refuse_weights(asked.net.weights, folder)
    net = load_net(asked.net, folder)
    recorded.expect(net, asked.net.model)
    other = f"{asked.net.model} in float" if folder is None else f"the simulation of {folder}"
    recorded.remark(f"running {file} in {runtime}, and {other}")
    of_data = fitting(asked.how, asked.data, asked.scored.test_data)
    batches, count = load_data(asked.data, of_data, Inputs.of(net)), of_data.num_samples
    models: dict[str, tuple[Predictor, str]] = {"float": (net, "cpu")}
    qmodel, compared, fault = None, batches.tracked("comparing"), ""
    if folder is None:
        parity = compare_model(net, file, compared, num_samples=count)
        fault = parity.fault(limits.tolerance()) if limits else ""
    else:
        qmodel = load_saved(folder, net, device="cpu")
        compare = check_parity if owner_of(file) is None else check_program
        parity = compare(qmodel, file, compared, tolerance=limits.tolerance(), num_samples=count)
        models = scored_models(qmodel)
    test = load_test(asked.scored, net, net, Inputs.of(net), asked.data, asked.how)
    accuracy = None if test is None else test.run({**models, **scored_file(file, net)})
    return FileParity(parity, fault=fault), batches.description, qmodel, accuracy


def _score_files(asked: CheckOptions, runtime: str) -> Accuracy | Scores | None:
    """The accuracy of the file, and of the float file if there is one."""
    model = FileModel(asked.file, runtime)
    inputs = inputs_of(model.session, str(asked.file))
    test = load_test(asked.scored, model, len(model.session.inputs), inputs, asked.data, asked.how)
    if test is None:
        return None
    float_file = {} if asked.against is None else {"float": (FileModel(asked.against, runtime), "cpu")}
    return test.run({**float_file, "file": (model, "cpu")})


def _fault(found: FileParity, runtime: str) -> str:
    if not found.fault:
        return ""
    if found.parity.against != AS_WRITTEN:
        return found.fault
    nowhere = "all quantized sites agree: it is an op whose output is not quantized"
    where = nowhere if found.divergence is None else f"the first site that differs is {found.divergence}"
    return f"{runtime} does not compute what the file says: {found.fault}; {where}"


def _missed(parity: Parity, min_top1: float | None) -> list[str]:
    """The user's own limits that are not kept."""
    scores = {output.name: output.top1 for output in parity.outputs if output.top1 is not None}
    if min_top1 is None:
        return []
    if not scores:
        raise DeploymentError(f"--min-top1 {min_top1}: no output of {parity.file} is (samples, classes)")
    missed = {name: top1 for name, top1 in scores.items() if top1 < min_top1}
    return [f"output {name}: top-1 {top1:.2%}; --min-top1 asks for {min_top1:.2%}" for name, top1 in missed.items()]


def _verdict(found: FileParity) -> str:
    text = str(found.parity)
    if found.divergence is not None and not found.fault:
        text += f". The first site that differs is {found.divergence}"
    if found.parity.against == AS_WRITTEN:
        text += ". It was compared with itself only: --model or --against compares it with the model that you mean"
    return text


def _table(parity: Parity) -> Table:
    columns = ("output", "largest difference", "mean", "SQNR", "same top-1", "samples")
    rows = []
    for output in parity.outputs:
        top1 = "-" if output.top1 is None else f"{output.top1:.2%}"
        differences = [f"{value:.2g} of range" for value in (output.max_difference, output.mean_difference)]
        rows.append([output.name, *differences, decibel(output.sqnr_db), top1, str(output.num_samples)])
    return table(columns, rows, numbers=columns[1:])
