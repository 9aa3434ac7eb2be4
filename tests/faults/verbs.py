"""The verbs that write results, each as: what is there before, the verb, and what the result is."""

from __future__ import annotations

import atexit
import copy
import functools
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import onnx_ir
import torch
from torch import nn

from sparsebit import llm
from sparsebit.deploy.onnx_graph import model_file
from sparsebit.deploy.programs.targets import TARGETS
from sparsebit.quantization import QuantModel
from sparsebit.quantization.exporting import export as exporting
from sparsebit.quantization.exporting import export_file
from sparsebit.quantization.exporting.export import build_onnx
from sparsebit.records import extend_record, write_record
from sparsebit.sparse import SparseModel, save
from tests.llm.tiny_models import saved, tiny_model, with_bpe
from tests.quantization.tiny import calibrated, qconfig
from tests.records.examples import RECORD
from tests.sparse.nets import Chain


@dataclass(frozen=True)
class Verb:
    """`run(folder, number)` writes the result of that number into the folder, over that of another number.

    `replaces`: whether an older result is replaced, or refused. `keeps`: the name of what a run that failed may leave,
    for the next one to go on with.
    """

    run: Callable[[Path, int], Any]
    replaces: bool = True
    keeps: str = ""


@functools.cache
def quantized(number: int) -> QuantModel:
    torch.manual_seed(number)
    return calibrated(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4)).eval(), [torch.randn(4, 6)])


@functools.cache
def pruned(number: int) -> nn.Module:
    torch.manual_seed(number)
    config = {"DEVICE": "cpu", "SPARSER": {"TYPE": "structured", "STRATEGY": "l1norm", "RATIO": 0.5}}
    smodel = SparseModel(Chain(), config, torch.randn(2, 3, 4, 4)).eval()
    smodel.calc_params()
    return smodel.shrink()


def save_quantized(folder: Path, number: int) -> None:
    quantized(number).save(folder / "saved")


def save_beside_notes(folder: Path, number: int) -> None:
    """Into a folder that holds other files too: its files change one by one."""
    if not (folder / "saved").exists():
        (folder / "saved").mkdir()
        (folder / "saved" / "notes.txt").write_bytes(b"mine")
    quantized(number).save(folder / "saved")


def save_pruned(folder: Path, number: int) -> None:
    save(pruned(number), folder / "small")


@functools.cache
def built(number: int) -> tuple[Any, Any]:
    found, sites = build_onnx(quantized(number), torch.zeros(1, 6))
    return onnx_ir.to_proto(found), sites


def export(folder: Path, number: int, *, largest_single_file: int = 1 << 30) -> None:
    """The graph is traced once for all steps."""
    proto, sites = built(number)
    with (
        mock.patch.object(exporting, "build_onnx", return_value=(onnx_ir.from_proto(proto), sites)),
        mock.patch.object(model_file.write, "__kwdefaults__", {"largest_single_file": largest_single_file}),
    ):
        quantized(number).export_onnx(torch.zeros(1, 6), folder / "model.onnx")


def record(folder: Path, number: int) -> None:
    write_record(folder / "record.json", replace(RECORD, config={"number": number}))


def extended_record(folder: Path, number: int) -> None:
    extend_record(folder / "record.json", replace(RECORD, config={"number": number}))


def draw(folder: Path, number: int) -> None:
    quantized(number).dump_mermaid(folder / "graph.md")


def visit_blocks(folder: Path, number: int) -> None:
    """The blocks of a model, each changed by a visit and kept."""
    qmodel = copy.deepcopy(quantized(number))

    def visit(data: Any) -> None:
        with torch.no_grad():
            for layer in data.block.modules.values():
                for parameter in layer.parameters():
                    parameter.mul_(1 + data.inputs[0][0].abs().mean())

    qmodel.visit_blocks([torch.ones(2, 6)], visit, blocks="layers", resume=folder / "run")
    qmodel.save(folder / "saved")


def quantize_llm(folder: Path, number: int) -> None:
    llm.quantize(float_folder(number), folder / "packed", RECIPE, check=False)


def convert_llm(form: str, folder: Path, number: int) -> None:
    llm.convert(packed_folder(number), folder / f"converted.{form}", form, check=False)


@functools.cache
def float_folder(number: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="faults-llama-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    tiny = tiny_model(num_hidden_layers=2, vocab_size=264, bos_token_id=257, eos_token_id=258)
    return with_bpe(saved(tiny, folder / "model"))


@functools.cache
def packed_folder(number: int) -> Path:
    return llm.quantize(float_folder(number), float_folder(number).parent / "packed", RECIPE, check=False).folder


RECIPE = llm.Recipe(method="rtn", scale_search="none", group_size=32, symmetric=True)


@functools.cache
def program(number: int) -> QuantModel:
    torch.manual_seed(number)
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4)).eval()
    return calibrated(net, [torch.randn(4, 6)], qconfig(backend="executorch"))


def export_program(folder: Path, number: int) -> None:
    """A program for a runtime, by a compiler that writes the stored integers in two steps."""

    def write(made: Any, _: Any, path: Path) -> None:
        tensors = [value.numpy().tobytes() for value in made.state_dict.values()]
        with path.open("wb") as file:
            file.write(tensors[0])
            file.flush()
            file.write(b"".join(tensors[1:]))

    changed = replace(TARGETS["executorch"], write=write, modules=())
    with mock.patch.object(export_file, "TARGETS", {"executorch": changed}):
        program(number).export(folder / "model.pte", torch.zeros(1, 6))


VERBS: dict[str, Verb] = {
    "save": Verb(save_quantized),
    "save beside notes": Verb(save_beside_notes),
    "save a pruned model": Verb(save_pruned),
    "export": Verb(export),
    "export with data": Verb(functools.partial(export, largest_single_file=0)),
    "export a program": Verb(export_program),
    "record": Verb(record),
    "extended record": Verb(extended_record),
    "mermaid": Verb(draw),
    "visit blocks": Verb(visit_blocks, replaces=False, keeps="run"),
    "llm quantize": Verb(quantize_llm, replaces=False, keeps="packed.partial"),
    "llm convert to gptq": Verb(functools.partial(convert_llm, "gptq"), replaces=False),
    "llm convert to gguf": Verb(functools.partial(convert_llm, "gguf"), replaces=False),
}
