"""`sparsebit demo`, with a network that has hardly been trained."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from sparsebit.cli import digits
from sparsebit.cli.verbs import demo
from sparsebit.cli.verbs.demo import recommended
from sparsebit.deploy.sessions.runtime_sessions import open_session
from sparsebit.quantization import parse_qconfig
from tests.cli.conftest import Sparsebit

SHORT = ("demo", "--epochs", 1, "--bits", "8,3")


@pytest.fixture(autouse=True)
def _sklearn() -> None:
    for package in ("sklearn", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)


@pytest.mark.exact_sums
def test_json(sparsebit: Sparsebit) -> None:
    threads = torch.get_num_threads()
    answer = sparsebit(*SHORT, "--json")
    assert answer.code == 0, answer.err
    record = answer.json
    assert record["num_test_images"] == 597 and record["num_calibration_images"] == 256
    eight, three, mixed = record["quantized"]
    assert (eight["bits"], three["bits"], mixed["bits"], three["raised"]) == (8, 3, 3, [])
    assert eight["agreement"] > 0.97 and eight["sqnr_db"] > three["sqnr_db"] and mixed["sqnr_db"] > three["sqnr_db"]
    assert record["float"]["weight_bytes"] > eight["weight_bytes"] > mixed["weight_bytes"] > three["weight_bytes"]
    worst = record["worst_layers"]["layers"]
    assert mixed["raised"] == [layer["layer"] for layer in worst[:3]]
    assert worst[0]["sqnr_db"] == min(layer["sqnr_db"] for layer in worst)
    assert torch.get_num_threads() == threads
    file = record["onnx"]
    assert file["file"] is None and file["parity"]["outputs"][0]["num_samples"] == 64
    assert file["agreement"] > 0.97 and abs(file["accuracy"] - eight["accuracy"]) < 0.02
    assert file["bytes"] < file["float_bytes"] / 2
    assert file["ratio"] > 0 and file["latency"]["quantized"]["num_rounds"] > 0 and "integers" in file["verdict"]


@pytest.mark.slow
def test_table(sparsebit: Sparsebit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "train", lambda *_, **__: digits.DigitNet().eval())
    monkeypatch.setattr(demo, "_TIMED_S", 0.1)
    answer = sparsebit(*SHORT, "--quiet", "--output", tmp_path / "demo.onnx")
    assert open_session(tmp_path / "demo.onnx").inputs == ("images",)
    assert answer.code == 0 and "training" not in answer.err
    text = " ".join(answer.out.split())
    assert "judged on 597 images that it never saw" in text and "simulated in float" in text
    assert "3 + 8 *" in text and "lose most at 4 bits" in text and "[" not in text.replace("[0]", "")
    assert f"file {tmp_path / 'demo.onnx'}" in text and "against the simulation, on 64 samples" in text
    assert "in float: 0." in text and "speed one image: " in text and "7 convolutions and 1 linear layer run in" in text


def test_without_scikit_learn(sparsebit: Sparsebit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    answer = sparsebit("demo")
    assert answer.code == 1 and "'scikit-learn>=" in answer.err


@pytest.mark.parametrize("package", ["onnx_ir", "onnxruntime"])
def test_without_what_the_file_needs(sparsebit: Sparsebit, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    answer = sparsebit("demo")
    assert answer.code == 1 and "'scikit-learn>=" in answer.err and "training" not in answer.err


def test_place_is_checked_before_the_training(sparsebit: Sparsebit, tmp_path: Path) -> None:
    answer = sparsebit("demo", "--output", tmp_path / "no" / "demo.onnx")
    assert answer.code == 1 and "does not exist" in answer.err and "training" not in answer.err


def test_config_is_right() -> None:
    config = parse_qconfig(recommended(3, ("head",)))
    assert config.resolve("W", "head").QUANTIZER.BIT == 8 and config.resolve("A", "stem").QUANTIZER.BIT == 3
