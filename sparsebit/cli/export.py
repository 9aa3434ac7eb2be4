"""`sparsebit export`: an ONNX file of a saved quantized model, or of a float model."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsebit.cli import options
from sparsebit.cli.option_groups import DataOptions, FileOptions, OutputOptions, grouped
from sparsebit.cli.output import facts_table, speaking
from sparsebit.cli.recording import Recording, recording

if TYPE_CHECKING:
    from torch import nn

    from sparsebit.cli.calibrated_model import Subject
    from sparsebit.cli.data import Data
    from sparsebit.cli.onnx_output import Exported
    from sparsebit.quantization.quant_model import QuantModel
    from sparsebit.records import RunRecord


@grouped
def export(
    model: options.Model,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE.onnx", help="The file; an older one is replaced.")
    ],
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR]", help="What quantize saved; without it the float model is exported."),
    ] = None,
    model_args: options.ModelArgs = None,
    weights: options.Weights = None,
    data: options.ComparedData = None,
    how: DataOptions = DataOptions(num_samples=64),
    written: FileOptions = FileOptions(),
    said: OutputOptions = OutputOptions(),
) -> None:
    """Write an ONNX file of a saved quantized model, or of a float model.

    With --data the file is run beside the model before it is kept. Without it, --size gives the shape of one image, or
    the folder that of the call that the model was built with, and nothing is compared.

    sparsebit export quantized/ -m my_model:Net -d photos/ --size 224 -o net-int8.onnx

    sparsebit export -m my_model:Net -w net.safetensors --size 224 -o net-float.onnx
    """
    with (
        speaking(as_json=said.json, quiet=said.quiet) as out,
        recording(said.record, "export", out) as recorded,
    ):
        from sparsebit.cli.calibrated_model import Subject
        from sparsebit.cli.data import Inputs, load_data
        from sparsebit.cli.first_batch import run_first_batch
        from sparsebit.cli.loading import load_model
        from sparsebit.cli.onnx_output import check_names, checked_file
        from sparsebit.cli.onnx_output import export as export_quantized
        from sparsebit.cli.size import weight_size
        from sparsebit.quantization.quant_model import QuantModel

        is_checked = data is not None and not written.no_check
        if written.limits and not is_checked:
            raise typer.BadParameter(f"{', '.join(written.limits.given())}: nothing is compared without --data")
        if folder is not None and weights is not None:
            raise typer.BadParameter(f"--weights: {folder} holds the weights")
        if written.extra_info and folder is None:
            raise typer.BadParameter("--extra-info: a float model has no sites")
        written = replace(written, no_check=not is_checked)
        net = load_model(model, model_args, weights)
        recorded.expect(net, model)
        qmodel = None if folder is None else QuantModel.load(folder, net, device="cpu")
        if qmodel is not None:
            recorded.expect_numbers(qmodel, model)
        target = checked_file(output, "virtual" if qmodel is None else qmodel.config.BACKEND, written)
        batches = made_up(how, qmodel) if data is None else load_data(data, how, Inputs.of(net))
        subject = Subject(net, batches, run_first_batch(net, batches))
        check_names(subject, written)
        out.remark(f"writing {output}" + (" and running it beside the model" if is_checked else ""))
        if qmodel is not None:
            done = export_quantized(subject, qmodel, target, written, weight_size(qmodel).float_bytes)
        else:
            done = _export_float(subject, target, written)
        if not is_checked:
            out.warn("the file was not compared with the model" + ("" if data else ": no --data"))
        if recorded:
            words = batches.description if is_checked else None
            recorded.write(_record(model, net, qmodel, done, words, recorded))
        record = {"model": model, "folder": None if folder is None else str(folder), "onnx": done.to_dict()}
        out.result({**record, **recorded.told()}, *([] if said.quiet else [facts_table(done.facts())]))


def _record(
    name: str, net: nn.Module, qmodel: QuantModel | None, done: Exported, words: str | None, to: Recording
) -> RunRecord:
    """What is known of the model, and the file that it became."""
    from sparsebit.quantization.recording import float_record, record

    facts, found = done.file_facts(), done.results(words)
    if qmodel is None:
        return float_record(net, name, facts, *found, run=to.run, warnings=to.warnings)
    made = record(qmodel, *found, name=name, file=done.file, run=to.run, warnings=to.warnings)
    return made.replace(file=facts)


def made_up(how: DataOptions, qmodel: QuantModel | None) -> Data:
    """One batch of random numbers in the shape that is known: an image's, or that of the saved model's example."""
    import torch
    from torch import Tensor

    from sparsebit.cli.data import Data
    from sparsebit.graph.nested import map_nested

    if how.size is not None:
        image = torch.randn(2, 1 if how.gray else 3, *how.size)
        return Data(f"random images of {how.size}", lambda: iter([image]))
    example = None if qmodel is None else qmodel.example_inputs
    if example is None:
        raise typer.BadParameter("how is the model called? Give --data, or --size for a model of images")

    def filled(x: Tensor) -> Tensor:
        return torch.randn(x.shape, dtype=x.dtype) if x.is_floating_point() else torch.zeros(x.shape, dtype=x.dtype)

    args, kwargs = (map_nested(Tensor, filled, part) for part in example)
    return Data("random numbers", lambda: iter([kwargs or args]))


def _export_float(subject: Subject, target: Path, written: FileOptions) -> Exported:
    """The model as it is, in a file for any runtime."""
    import torch

    from sparsebit.cli.onnx_output import Exported, example_of
    from sparsebit.deploy.model_file import data_files, staged, write
    from sparsebit.deploy.naming import tidy
    from sparsebit.deploy.runtimes import PROFILES
    from sparsebit.deploy.to_onnx import in_order, to_onnx
    from sparsebit.quantization.export_checks import compare_model
    from sparsebit.records.phases import EXPORT, phase

    (args, keywords), axes = example_of(subject, written)
    signature = inspect.signature(subject.model.forward)
    with phase(EXPORT):
        made: Any = to_onnx(
            subject.model,
            args,
            in_order(keywords, signature),
            signature=signature,
            input_names=written.input_names,
            output_names=written.output_names,
            dynamic_axes=axes,
            opset_version=written.opset or PROFILES["virtual"].opset,
        )
        tidy(made, {})
    parity = None
    with staged(target) as path:
        write(made, path)
        if not written.no_check:
            with torch.no_grad():
                limits = written.limits.tolerance()
                parity = compare_model(subject.model, path, subject.data, tolerance=limits, name=str(target))
    num_bytes = sum(path.stat().st_size for path in (target, *data_files(target)))
    return Exported(target, num_bytes, _float_bytes(subject.model), parity)


def _float_bytes(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
