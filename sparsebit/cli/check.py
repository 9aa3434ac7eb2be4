"""`sparsebit check`: does a runtime compute what an ONNX file says, and how far is that from the float file?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparsebit.cli import options
from sparsebit.cli.option_groups import DataOptions, Limits, OutputOptions, grouped
from sparsebit.cli.output import decibel, speaking
from sparsebit.cli.recording import Recording, recording

if TYPE_CHECKING:
    from rich.table import Table

    from sparsebit.deploy.check import FileParity
    from sparsebit.deploy.parity import Parity
    from sparsebit.quantization.quant_model import QuantModel
    from sparsebit.records import RunRecord


@grouped
def check(
    file: Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="The file, of any tool.")],
    data: options.Data,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            metavar="FLOAT.onnx|DIR",
            help="The float file to compare with, or with --model the folder that quantize saved; without both, the "
            "same file node by node as it is written.",
        ),
    ] = None,
    runtime: Annotated[
        str | None,
        typer.Option(
            "--runtime",
            "-r",
            metavar="NAME",
            help="onnxruntime or openvino; by default the one that the file was exported for.",
        ),
    ] = None,
    model: options.SourceModel = None,
    model_args: options.ModelArgs = None,
    weights: options.Weights = None,
    limits: Limits = Limits(),
    min_top1: options.MinTop1 = None,
    how: DataOptions = DataOptions(num_samples=64),
    said: OutputOptions = OutputOptions(),
) -> None:
    """Run an ONNX file on real data and compare.

    Alone, the file is compared with itself only: a runtime rewrites the graph before it executes it, and here you see
    whether it still computes what is written, and if not, where it leaves it. That it does not is a fault (exit code
    1). Whether what is written is right, only the source can tell: with --model and --against DIR the file is compared
    with the simulation of the saved model, which it must equal as export_onnx demands. With --model alone it is
    compared with the float model, with --against with the float file; how far is too far is for you to say (--exact,
    --min-sqnr, --min-top1).

    sparsebit check resnet18-int8.onnx -d photos/ --size 224 --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225

    sparsebit check model.onnx --against float.onnx -d test.npz --min-top1 0.99

    sparsebit check model.onnx --model my_model:Net --against quantized/ -d test.npz
    """
    with (
        speaking(as_json=said.json, quiet=said.quiet) as out,
        recording(said.record, "check", out) as recorded,
    ):
        from sparsebit.cli.check_source import Source
        from sparsebit.cli.onnx_inputs import FileData
        from sparsebit.deploy.check import check_against, check_as_written, runtime_of
        from sparsebit.errors import DeploymentError

        chosen = runtime or runtime_of(file)
        batches = FileData(data, how, str(file))
        if model is not None:
            if runtime is not None:
                raise typer.BadParameter("--runtime: with --model the file runs where it was exported for")
            source = Source(model, model_args, weights, against)
            out.remark(f"running {file} in {chosen}, and {source}")
            found, description, qmodel = source.compared(file, data, how, limits, recorded)
        else:
            _refuse_without_model(model_args, weights, against)
            recorded.expect_file(file)
            out.remark(f"running {file} in {chosen}, and {against or 'node by node as it is written'}")
            tolerance = limits.tolerance()
            if against is None:
                found = check_as_written(file, batches, chosen, tolerance)
            else:
                found = check_against(file, against, batches, chosen, tolerance if limits else None)
            description, qmodel = batches.description, None
        fault = "; ".join(filter(None, (_fault(found, chosen), *_missed(found.parity, min_top1))))
        record = {
            **found.parity.to_dict(),
            "data": description,
            "first_divergence": None if found.divergence is None else asdict(found.divergence),
            "fault": fault or None,
            **recorded.told(),
        }
        if recorded:
            recorded.write(_record(file, model, qmodel, found, fault, description, recorded))
        out.result(record, *([] if said.quiet else [_table(found.parity)]), _verdict(found))
        if fault:
            raise DeploymentError(f"{file}: {fault}")


def _record(
    file: Path, model: str | None, qmodel: QuantModel | None, found: FileParity, fault: str, data: str, to: Recording
) -> RunRecord:
    """What was found of the file; and of the quantized model, where it was compared with that."""
    from sparsebit.quantization.recording import file_record, record
    from sparsebit.records import ParityCheck

    divergence = None if found.divergence is None else str(found.divergence)
    check = ParityCheck(found.parity, fault or None, data, divergence)
    if qmodel is None:
        return file_record(file, check, run=to.run, warnings=to.warnings)
    return record(qmodel, check, name=model, file=file, run=to.run, warnings=to.warnings)


def _refuse_without_model(model_args: object, weights: object, against: Path | None) -> None:
    given = [f"--{name}" for name, value in (("model-args", model_args), ("weights", weights)) if value is not None]
    if given:
        raise typer.BadParameter(f"{', '.join(given)}: of which --model?")
    if against is not None and against.is_dir():
        raise typer.BadParameter(f"--against {against} is a folder: name the model that it was saved from, --model")


def _fault(found: FileParity, runtime: str) -> str:
    from sparsebit.deploy.check import AS_WRITTEN

    if not found.fault:
        return ""
    if found.parity.against != AS_WRITTEN:
        return found.fault
    where = "all quantized sites agree: it is an op whose output is not quantized"
    if found.divergence is not None:
        where = f"the first site that differs is {found.divergence}"
    return f"{runtime} does not compute what the file says: {found.fault}; {where}"


def _missed(parity: Parity, min_top1: float | None) -> list[str]:
    """The user's own limit that is not kept."""
    from sparsebit.errors import DeploymentError

    scored = [output for output in parity.outputs if output.top1 is not None]
    if min_top1 is not None and not scored:
        raise DeploymentError(f"--min-top1 {min_top1}: no output of {parity.file} is (samples, classes)")
    return [
        f"output {output.name}: top-1 {output.top1:.2%}; --min-top1 asks for {min_top1:.2%}"
        for output in parity.outputs
        if min_top1 is not None and output.top1 is not None and output.top1 < min_top1
    ]


def _verdict(found: FileParity) -> str:
    from sparsebit.deploy.check import AS_WRITTEN

    itself = (
        ". It was compared with itself only: whether it is the model that you mean, --model or --against tells"
        if found.parity.against == AS_WRITTEN
        else ""
    )
    return f"{_words(found)}{itself}"


def _words(found: FileParity) -> str:
    if found.divergence is None or found.fault:
        return str(found.parity)
    return f"{found.parity}. The first site that differs is {found.divergence}"


def _table(parity: Parity) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("output", overflow="fold")
    for column in ("largest difference", "mean", "SQNR", "same top-1", "samples"):
        table.add_column(column, justify="right")
    for output in parity.outputs:
        top1 = "-" if output.top1 is None else f"{output.top1:.2%}"
        differences = [f"{value:.2g} of range" for value in (output.max_difference, output.mean_difference)]
        table.add_row(Text(output.name), *differences, decibel(output.sqnr_db), top1, str(output.num_samples))
    return table
