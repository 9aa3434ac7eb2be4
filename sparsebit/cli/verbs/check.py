"""`sparsebit check`: does a runtime compute what an ONNX file says, and how far is that from the float model?"""

from __future__ import annotations

from dataclasses import asdict

import typer
from rich.table import Table

from sparsebit.cli.inputs.accuracy import Accuracy, Predictor, Scores
from sparsebit.cli.inputs.calibrated_model import load_saved, scored_models
from sparsebit.cli.inputs.data import Inputs, fitting, load_data
from sparsebit.cli.inputs.loading import LoadingError, load_net, refuse_weights
from sparsebit.cli.inputs.onnx_inputs import FileData, FileModel, inputs_of
from sparsebit.cli.inputs.scoring import load_test
from sparsebit.cli.option_groups import typed
from sparsebit.cli.outputs.onnx_output import scored_file
from sparsebit.cli.outputs.output import Output, decibel, table
from sparsebit.cli.outputs.recording import Recording
from sparsebit.cli.verb_options import CheckOptions
from sparsebit.deploy.comparing.check import AS_WRITTEN, FileParity, check_against, check_as_written, runtime_of
from sparsebit.deploy.comparing.parity import Parity
from sparsebit.errors import DeploymentError
from sparsebit.quantization.exporting.export_checks import check_parity, compare_model
from sparsebit.quantization.model.quant_model import QuantModel
from sparsebit.quantization.recording import file_record, record
from sparsebit.records import ParityCheck, RunRecord


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
    fault = "; ".join(filter(None, (_fault(found, chosen), *_missed(found.parity, asked.min_top1))))
    record = {
        **found.parity.to_dict(),
        "data": description,
        "first_divergence": None if found.divergence is None else asdict(found.divergence),
        "fault": fault or None,
        "accuracy": None if accuracy is None else accuracy.to_dict(),
        **recorded.values(),
    }
    if recorded:
        recorded.write(_record(asked, qmodel, found, fault, description, recorded))
    scores = [] if accuracy is None else [str(accuracy)]
    out.result(record, _verdict(found), *scores, details=[_table(found.parity)])
    if fault:
        raise DeploymentError(f"{file}: {fault}")


def _check(asked: CheckOptions) -> None:
    """Raise before the work for options that cannot be used together."""
    if asked.net.model:
        if asked.runtime is not None:
            raise typer.BadParameter("--runtime: with --model the file runs where it was exported for")
        if asked.quantized is not None and asked.against is not None:
            raise typer.BadParameter("give --quantized DIR or --against FLOAT.onnx")
        if asked.saved is not None and not asked.saved.is_dir():
            option = "--against" if asked.quantized is None else "--quantized"
            raise LoadingError(
                f"{option} {asked.saved}: with --model it is the folder that quantize saved; to compare with a "
                "file, leave --model out"
            )
        return
    if given := [*typed(asked.net), *typed(asked, ["quantized"])]:
        raise typer.BadParameter(f"{', '.join(given)}: --model is required")
    if asked.against is not None and asked.against.is_dir():
        raise typer.BadParameter(
            f"--against {asked.against} is a folder: name the model that it was saved from, --model"
        )


def _compare_model(
    asked: CheckOptions, runtime: str, recorded: Recording
) -> tuple[FileParity, str, QuantModel | None, Accuracy | Scores | None]:
    """Compare the file with the float model, or with the simulation of the saved one; also describes the data,
    scores.
    """
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
        parity = check_parity(qmodel, file, compared, tolerance=limits.tolerance(), num_samples=count)
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


def _record(
    asked: CheckOptions, qmodel: QuantModel | None, found: FileParity, fault: str, data: str, to: Recording
) -> RunRecord:
    """The findings on the file, and on the quantized model if the file was compared with it."""
    divergence = None if found.divergence is None else str(found.divergence)
    check = ParityCheck(found.parity, fault or None, data, divergence)
    if qmodel is None:
        return file_record(asked.file, check, run=to.run, warnings=to.warnings)
    return record(qmodel, check, name=asked.net.model, file=asked.file, run=to.run, warnings=to.warnings)


def _fault(found: FileParity, runtime: str) -> str:
    if not found.fault:
        return ""
    if found.parity.against != AS_WRITTEN:
        return found.fault
    where = "all quantized sites agree: it is an op whose output is not quantized"
    if found.divergence is not None:
        where = f"the first site that differs is {found.divergence}"
    return f"{runtime} does not compute what the file says: {found.fault}; {where}"


def _missed(parity: Parity, min_top1: float | None) -> list[str]:
    """The user's own limits that are not kept."""
    scored = [output for output in parity.outputs if output.top1 is not None]
    if min_top1 is not None and not scored:
        raise DeploymentError(f"--min-top1 {min_top1}: no output of {parity.file} is (samples, classes)")
    return [
        f"output {output.name}: top-1 {output.top1:.2%}; --min-top1 asks for {min_top1:.2%}"
        for output in parity.outputs
        if min_top1 is not None and output.top1 is not None and output.top1 < min_top1
    ]


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
