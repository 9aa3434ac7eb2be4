"""`sparsebit profile`: the table of errors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from rich.console import Console
from torch import nn

import sparsebit as package
from sparsebit.cli.profile import error_table
from sparsebit.records import Coverage, LayerError, QuantizedLayer

if TYPE_CHECKING:
    from tests.cli.conftest import Sparsebit

COMMAND = ("profile", "--model", "own_project:Net", "--data", "own_project:batches")


def test_worst_first(sparsebit: Sparsebit, project: Path) -> None:
    answer = sparsebit(*COMMAND, "-c", "virtual", "--device", "cpu", "--json")
    assert answer.code == 0, answer.err
    layers = answer.json["layers"]
    assert {"stem.0", "body.0", "head"} <= {layer["layer"] for layer in layers}
    assert [layer["sqnr_db"] for layer in layers] == sorted(layer["sqnr_db"] for layer in layers)
    assert answer.json["num_layers"] == len(layers) and answer.json["output_sqnr_db"] > 25


def test_table(sparsebit: Sparsebit, project: Path) -> None:
    answer = sparsebit(*COMMAND, "-c", "virtual", "--device", "cpu", "--top", 1, "--sync", "--quiet")
    assert answer.code == 0 and "all layers quantized together" in answer.out
    assert answer.out.count(" dB") == 2  # the output's and one layer's
    assert "better ones (--top 0 shows all)" in answer.out and "calibrating" not in answer.err


def test_saved_model_brings_its_own_weights(sparsebit: Sparsebit, project: Path) -> None:
    saved = sparsebit("quantize", *COMMAND[1:], "--device", "cpu", "-o", "saved", "--json").json
    Path("own_project.py").write_text(Path("own_project.py").read_text().replace("manual_seed(0)", "manual_seed(9)"))
    answer = sparsebit(*COMMAND, "--quantized", "saved", "--json")
    assert answer.code == 0, answer.err
    assert answer.json["output_sqnr_db"] == pytest.approx(saved["output_sqnr_db"], abs=0.1)
    assert answer.json["backend"] == "onnxruntime"


@pytest.mark.parametrize("option", [["--asym"], ["--config", "virtual"], ["--device", "cpu"]], ids=" ".join)
def test_saved_model_has_its_config(sparsebit: Sparsebit, project: Path, option: list[str]) -> None:
    answer = sparsebit(*COMMAND, "--quantized", "saved", *option)
    assert answer.code == 2 and "a saved model has its config" in answer.err


def test_no_saved_model(sparsebit: Sparsebit, project: Path) -> None:
    answer = sparsebit(*COMMAND, "--quantized", "nowhere")
    assert answer.code == 1 and "nowhere holds no sparsebit.json" in answer.err


def test_errors_are_those_of_the_model() -> None:
    model, x = nn.Linear(6, 5).eval(), torch.randn(16, 6)
    qmodel = package.quantize(
        model, [x], {"DEVICE": "cpu", "W": {"QUANTIZER": {"BIT": 4}}, "A": {"QUANTIZER": {"BIT": 4}}}
    )
    (error,) = qmodel.profile([x]).layers
    with torch.no_grad():
        noise, signal = (qmodel(x) - model(x)).square().mean().item(), model(x).square().mean().item()
    assert error.error == pytest.approx(noise, rel=1e-4)
    assert error.sqnr_db == pytest.approx(10 * math.log10(signal / noise), abs=1e-3)


def test_table_shows_formats_and_odd_names() -> None:
    coverage = Coverage(
        quantized=(
            QuantizedLayer("conv[0]", "QConv2d", {"input": "uint8", "weight": "int4", "output": "int8"}),
            QuantizedLayer("add", "QIdentity", {"input.0": "uint8", "input.1": "int8"}),
        )
    )
    errors = [
        LayerError("conv[0]", 0.5, 3.0),
        LayerError("add", 0.25, 9.0),
        LayerError("conv[0].output", 0.1, 20.0),
        LayerError("exact", 0.0, math.inf),
        LayerError("dead", 1.0, -math.inf),
    ]
    console = Console(width=100, file=None, record=True, quiet=False)
    with console.capture() as captured:
        console.print(error_table(errors, coverage))
    rows = {cells[0]: cells[1:] for line in captured.get().splitlines() if (cells := line.split())}
    assert rows["conv[0]"][:5] == ["int4", "uint8", "0.5", "3.0", "dB"]
    assert rows["add"][:4] == ["-", "uint8,", "int8", "0.25"]
    assert rows["conv[0].output"][:3] == ["-", "int8", "0.1"]
    assert rows["exact"][3] == "exact" and rows["dead"][3:5] == ["no", "signal"]
