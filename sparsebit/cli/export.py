"""`sparsebit export`: an ONNX file of a saved quantized model, or of a float model."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsebit.cli import options
from sparsebit.cli.output import facts_table, speaking

if TYPE_CHECKING:
    from torch import nn

    from sparsebit.cli.calibrating import Subject
    from sparsebit.cli.data import Data, DataOptions
    from sparsebit.cli.exporting import Exported, FileOptions
    from sparsebit.quantization.quant_model import QuantModel


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
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            "-d",
            metavar="SOURCE",
            help="Shows how the model is called, and the file is compared on it: as in quantize.",
            rich_help_panel="Data",
        ),
    ] = None,
    size: options.ImageSize = None,
    resize: options.Resize = None,
    mean: options.Mean = None,
    std: options.Std = None,
    gray: options.Gray = False,
    batch_size: options.BatchSize = None,
    num_samples: options.NumSamples = 64,
    input: options.Arrays = None,
    no_check: options.NoCheck = False,
    exact: options.Exact = False,
    min_sqnr: options.MinSqnr = None,
    allow_nan: options.AllowNan = False,
    dynamic_batch: options.DynamicBatch = False,
    opset: options.Opset = None,
    input_names: options.InputNames = None,
    output_names: options.OutputNames = None,
    extra_info: options.ExtraInfo = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Write an ONNX file of a saved quantized model, or of a float model.

    With --data the file is run beside the model before it is kept. Without it, --size gives the shape of one image, or
    the folder that of the call that the model was built with, and nothing is compared.

    sparsebit export quantized/ -m my_model:Net -d photos/ --size 224 -o net-int8.onnx

    sparsebit export -m my_model:Net -w net.safetensors --size 224 -o net-float.onnx
    """
    with speaking(as_json=json, quiet=quiet) as out:
        from sparsebit.cli.calibrating import Subject
        from sparsebit.cli.data import DataOptions, Inputs, load_data
        from sparsebit.cli.exporting import FileOptions, Limits, check_names, checked_file
        from sparsebit.cli.exporting import export as export_quantized
        from sparsebit.cli.loading import load_model
        from sparsebit.cli.size import weight_size
        from sparsebit.cli.trial import run_first
        from sparsebit.quantization.quant_model import QuantModel

        limits = Limits(exact, min_sqnr, allow_nan)
        is_checked = data is not None and not no_check
        if limits and not is_checked:
            raise typer.BadParameter(f"{', '.join(limits.given())}: nothing is compared without --data")
        if folder is not None and weights is not None:
            raise typer.BadParameter(f"--weights: {folder} holds the weights")
        if extra_info and folder is None:
            raise typer.BadParameter("--extra-info: a float model has no sites")
        written = FileOptions(opset, dynamic_batch, input_names, output_names, extra_info, not is_checked, limits)
        net = load_model(model, model_args, weights)
        qmodel = None if folder is None else QuantModel.load(folder, net, device="cpu")
        target = checked_file(output, "virtual" if qmodel is None else qmodel.config.BACKEND, written)
        how = DataOptions(size, resize, mean, std, gray, batch_size, num_samples, input)
        batches = made_up(how, qmodel) if data is None else load_data(data, how, Inputs.of(net))
        subject = Subject(net, batches, run_first(net, batches))
        check_names(subject, written)
        out.remark(f"writing {output}" + (" and running it beside the model" if is_checked else ""))
        if qmodel is not None:
            done = export_quantized(subject, qmodel, target, written, weight_size(qmodel).float_bytes)
        else:
            done = _export_float(subject, target, written)
        if not is_checked:
            out.warn("the file was not compared with the model" + ("" if data else ": no --data"))
        record = {"model": model, "folder": None if folder is None else str(folder), "onnx": done.to_dict()}
        out.result(record, *([] if quiet else [facts_table(done.facts())]))


def made_up(how: DataOptions, qmodel: QuantModel | None) -> Data:
    """One batch of random numbers in the shape that is known: an image's, or that of the saved model's example."""
    import torch
    from torch import Tensor

    from sparsebit.cli.data import Data
    from sparsebit.graph.nested import map_nested

    if how.size is not None:
        image = torch.randn(2, 1 if how.gray else 3, *how.size)
        return Data(f"random images of {how.size}", lambda: iter([image]))
    example = None if qmodel is None else qmodel._example
    if example is None:
        raise typer.BadParameter("how is the model called? Give --data, or --size for a model of images")

    def filled(x: Tensor) -> Tensor:
        return torch.randn(x.shape, dtype=x.dtype) if x.is_floating_point() else torch.zeros(x.shape, dtype=x.dtype)

    args, kwargs = (map_nested(Tensor, filled, part) for part in example)
    return Data("random numbers", lambda: iter([kwargs or args]))


def _export_float(subject: Subject, target: Path, written: FileOptions) -> Exported:
    """The model as it is, in a file for any runtime."""
    import torch

    from sparsebit.cli.exporting import Exported, example_of
    from sparsebit.deploy.model_file import data_files, staged, write
    from sparsebit.deploy.naming import tidy
    from sparsebit.deploy.runtimes import PROFILES
    from sparsebit.deploy.to_onnx import in_order, to_onnx
    from sparsebit.quantization.gate import compare_model

    (args, keywords), axes = example_of(subject, written)
    signature = inspect.signature(subject.model.forward)
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
