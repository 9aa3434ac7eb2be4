"""`sparsebit export`: an ONNX file of a saved quantized model, or of a float model."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor, nn

from sparsebit.cli.inputs.calibrated_model import Subject, load_saved, scored_models
from sparsebit.cli.inputs.data import Data, Inputs, fitting, load_data
from sparsebit.cli.inputs.first_batch import run_first_batch
from sparsebit.cli.inputs.loading import load_net, refuse_weights, weights_source
from sparsebit.cli.inputs.scoring import load_test
from sparsebit.cli.option_groups import DataOptions, FileOptions
from sparsebit.cli.options import refuse
from sparsebit.cli.outputs.onnx_output import Exported, check_names, checked_file, example_of, scored_file
from sparsebit.cli.outputs.onnx_output import export as export_quantized
from sparsebit.cli.outputs.output import Output, facts_table
from sparsebit.cli.outputs.output_names import check_onnx_name
from sparsebit.cli.outputs.recording import Recording
from sparsebit.cli.outputs.size import weight_size
from sparsebit.cli.verb_options import ExportOptions
from sparsebit.deploy.exporting.node_names import tidy
from sparsebit.deploy.exporting.to_onnx import OnnxOptions, in_order, to_onnx
from sparsebit.deploy.onnx_graph.model_file import data_files, staged, write
from sparsebit.deploy.runtimes import PROFILES, owner_of
from sparsebit.graph.values.nested import map_nested
from sparsebit.quantization.exporting.export_checks import compare_model
from sparsebit.quantization.model.quant_model import QuantModel
from sparsebit.quantization.recording import float_record, record
from sparsebit.records import RunRecord
from sparsebit.records.phases import EXPORT, phase


def export(asked: ExportOptions, out: Output, recorded: Recording) -> None:
    """Load, write and compare the file, and report."""
    data, written, folder = asked.data, asked.written, asked.quantized or asked.folder
    is_checked, limits = data is not None and not written.no_check, ", ".join(written.limits.given())
    both = None not in (asked.quantized, asked.folder)
    refuse(
        {
            f"{asked.folder}: --quantized names the folder already; give one of them": both,
            f"{limits}: nothing is compared without --data": limits and not is_checked,
            "--extra-info: a float model has no quantized sites": written.extra_info and folder is None,
        }
    )
    if folder is not None:
        refuse_weights(asked.net.weights, folder)
    elif owner_of(asked.output) is None:
        check_onnx_name(asked.output)
    else:
        fault = f"{asked.output}: a float model is written as an ONNX file; quantize it for {owner_of(asked.output)}"
        raise typer.BadParameter(fault, param_hint="--output")
    scores_file, written = not written.no_check, replace(written, no_check=not is_checked)
    net = load_net(asked.net, folder)
    recorded.expect(net, asked.net.model)
    qmodel = None if folder is None else load_saved(folder, net, device="cpu")
    if qmodel is not None:
        recorded.expect_numbers(qmodel, asked.net.model)
    if data is None:
        batches = made_up(asked.how, qmodel)
    else:
        batches = load_data(data, fitting(asked.how, data, asked.scored.test_data), Inputs.of(net))
    target = checked_file(asked.output, "virtual" if qmodel is None else qmodel.config.BACKEND, written)
    subject = Subject(net, batches, run_first_batch(net, batches))
    check_names(subject, written)
    test = load_test(asked.scored, net, net, Inputs.of(net), data, _of_test(asked))
    out.remark(f"writing {asked.output}" + (" and comparing it with the model" if is_checked else ""))
    if qmodel is not None:
        done = export_quantized(subject, qmodel, target, written, weight_size(qmodel).float_bytes)
    else:
        done = _export_float(subject, target, written)
    if not is_checked:
        out.warn("the file was not compared with the model" + ("" if data else ": no --data"))
    models = {"float": (net, "cpu")} if qmodel is None else scored_models(qmodel)
    accuracy = None if test is None else test.run({**models, **(scored_file(done.file, net) if scores_file else {})})
    if recorded:
        words = batches.description if is_checked else None
        made = _record(asked.net.model, net, qmodel, done, words, recorded)
        recorded.write(made.replace(accuracy=accuracy and accuracy.facts()))
    record = {
        "model": asked.net.model,
        "weights": weights_source(asked.net.model, asked.net.weights, folder),
        "folder": folder and str(folder),
        "onnx": done.to_dict(),
        "accuracy": accuracy and accuracy.to_dict(),
    }
    facts = {**done.facts(), "accuracy": str(accuracy or "")}
    out.result({**record, **recorded.values()}, details=[facts_table(facts)])
    if qmodel is not None:
        out.next_steps(f"sparsebit audit {asked.output}   # which layers run in integers, and why not")


def _of_test(asked: ExportOptions) -> DataOptions:
    """Without data, --size is that of a generated image, but test data in arrays cannot have a --size."""
    no_fit = asked.data is not None or asked.scored.test_data is None
    return asked.how if no_fit else fitting(asked.how, asked.scored.test_data or "", ".")


def _record(
    name: str, net: nn.Module, qmodel: QuantModel | None, done: Exported, words: str | None, to: Recording
) -> RunRecord:
    """The facts of the model, and the exported file."""
    facts, found = done.file_facts(), done.results(words)
    if qmodel is None:
        return float_record(net, name, facts, *found, run=to.run, warnings=to.warnings)
    made = record(qmodel, *found, name=name, file=done.file, run=to.run, warnings=to.warnings)
    return made.replace(file=facts)


def made_up(how: DataOptions, qmodel: QuantModel | None) -> Data:
    """One batch of random numbers in the known shape: an image's, or that of the saved model's example."""
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
    (args, keywords), axes = example_of(subject, written)
    signature = inspect.signature(subject.model.forward)
    with phase(EXPORT):
        opset = written.opset or PROFILES["virtual"].opset
        options = OnnxOptions(written.input_names, written.output_names, axes, opset)
        made: Any = to_onnx(subject.model, args, in_order(keywords, signature), options, signature=signature)
        tidy(made, {})
    parity = None
    with staged(target) as path:
        write(made, path)
        if not written.no_check:
            with torch.no_grad():
                limits = written.limits.tolerance()
                parity = compare_model(subject.model, path, subject.data, tolerance=limits, name=str(target))
    num_bytes = sum(path.stat().st_size for path in (target, *data_files(target)))
    return Exported(target, num_bytes, sum(parameter.nbytes for parameter in subject.model.parameters()), parity)
