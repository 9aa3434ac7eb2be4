"""`sparsebit demo`, with a network that has hardly been trained."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
import torch

from sparsebit.cli import digits
from sparsebit.cli.demo import recommended
from sparsebit.quantization import parse_qconfig

if TYPE_CHECKING:
    from tests.cli.conftest import Sparsebit

SHORT = ("demo", "--epochs", 1, "--bits", "8,3")


@pytest.fixture(autouse=True)
def _sklearn() -> None:
    pytest.importorskip("sklearn")


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


def test_table(sparsebit: Sparsebit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "train", lambda *_, **__: digits.DigitNet().eval())
    answer = sparsebit(*SHORT, "--quiet")
    assert answer.code == 0 and "training" not in answer.err
    text = " ".join(answer.out.split())
    assert "judged on 597 images that it never saw" in text and "simulated in float" in text
    assert "3 + 8 *" in text and "lose most at 4 bits" in text and "[" not in text.replace("[0]", "")


def test_without_scikit_learn(sparsebit: Sparsebit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    answer = sparsebit("demo")
    assert answer.code == 1 and "pip install 'sparsebit[demo]'" in answer.err


def test_config_is_right() -> None:
    config = parse_qconfig(recommended(3, ("head",)))
    assert config.resolve("W", "head").QUANTIZER.BIT == 8 and config.resolve("A", "stem").QUANTIZER.BIT == 3
