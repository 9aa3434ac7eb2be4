"""`sparsebit config check`: right or wrong, and what it does to a model."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from torch import Tensor, nn

from sparsebit.quantization import QuantModel, parse_qconfig
from tests.cli.conftest import Sparsebit

RIGHT = "W: {QUANTIZER: {BIT: 4}}\nA: {QUANTIZER: {BIT: 8}}\n"


@pytest.fixture
def config(project: Path) -> Path:
    return project / "config.yaml"


def test_right(sparsebit: Sparsebit, config: Path) -> None:
    config.write_text(RIGHT)
    answer = sparsebit("config", "check", "config.yaml")
    right, following = answer.err.splitlines()
    assert (answer.code, answer.out, right) == (0, "", "config.yaml is right: W4 A8 on virtual")
    assert following.startswith("next: sparsebit config check config.yaml -m ")


def test_wrong(sparsebit: Sparsebit, config: Path) -> None:
    config.write_text("W: {QUANTIZER: {BITS: 4}}\nA: {QUANTIZER: {BIT: 8}}\n")
    answer = sparsebit("config", "check", "config.yaml")
    assert answer.code == 1 and answer.out == ""
    assert "line 1: W.QUANTIZER.BITS=4: unknown key" in answer.err and "did you mean W.QUANTIZER.BIT?" in answer.err


def test_rule_of_the_backend(sparsebit: Sparsebit, config: Path) -> None:
    config.write_text(f"BACKEND: tensorrt\n{RIGHT}")
    answer = sparsebit("config", "check", "config.yaml")
    assert answer.code == 1 and "tensorrt" in answer.err


@pytest.mark.parametrize("backend", ["virtual", "onnxruntime", "openvino", "tensorrt"])
def test_full_of_a_backend_is_a_config_to_start_from(sparsebit: Sparsebit, backend: str) -> None:
    answer = sparsebit("config", "check", backend, "--full")
    assert answer.code == 0
    config = parse_qconfig(answer.out)
    assert backend == config.BACKEND and config.is_set("W.OBSERVER.PERCENTILE.ALPHA")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # its own profile has nothing against it
        QuantModel(AddedTwice(), config.replace("DEVICE", "cpu"))


class AddedTwice(nn.Module):
    """An add behind a convolution, which runtimes quantize, and one that they leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = (self.norm(self.conv(x)) + x).mean((2, 3))
        return self.fc(y) + y


def test_plan(sparsebit: Sparsebit, config: Path) -> None:
    config.write_text(f"DEVICE: cuda\n{RIGHT.replace('4}', '4}, SPECIFIC: [{head: [QUANTIZER.BIT, 8]}]')}")
    answer = sparsebit("config", "check", "config.yaml", "-m", "own_project:Net")
    assert answer.code == 0, answer.err
    rows = {cells[0]: cells[1:] for line in answer.out.splitlines() if (cells := line.split())}
    assert rows["stem.0"] == ["QConv2d", "int4", "uint8", "-"] and rows["head"] == ["QLinear", "int8", "uint8", "-"]
    assert rows["add"] == ["A.QADD.ENABLE_QUANT", "is", "off"]
    assert answer.out.endswith("3 of 3 weighted layers are quantized\n")


def test_which_entry_won(sparsebit: Sparsebit, config: Path) -> None:
    specific = "SPECIFIC: [{head: [QUANTIZER.BIT, 8]}, {'*': [QUANTIZER.BIT, 2]}]"
    config.write_text(RIGHT.replace("4}", f"4}}, {specific}"))
    answer = sparsebit("config", "check", "config.yaml", "-m", "own_project:Net")
    assert answer.code == 0, answer.err
    rows = [line.split() for line in answer.out.splitlines()]
    assert ["head", "head", "-"] in rows and ["stem.0", "*", "-"] in rows
    record = sparsebit("config", "check", "config.yaml", "-m", "own_project:Net", "--json").json
    assert record["specific"]["head"] == {"W": "head"} and record["specific"]["stem.0"] == {"W": "*"}


def test_glob_without_a_layer_is_a_warning(sparsebit: Sparsebit, config: Path) -> None:
    config.write_text(RIGHT.replace("4}", "4}, SPECIFIC: [{haed: [QUANTIZER.BIT, 8]}]"))
    answer = sparsebit("config", "check", "config.yaml", "-m", "own_project:Net", "-q")
    assert answer.code == 0 and answer.err.startswith("warning: W.SPECIFIC: the glob 'haed' matches no layer")


def test_json(sparsebit: Sparsebit, config: Path) -> None:
    config.write_text(RIGHT)
    record = sparsebit("config", "check", "config.yaml", "-m", "own_project:Net", "--json").json
    assert record["config"]["W"]["QUANTIZER"]["BIT"] == 4 and record["config"]["A"]["OBSERVER"]["TYPE"] == "minmax"
    assert record["coverage"]["weighted_fraction"] == 1.0 and record["warnings"] == []


def test_arguments_need_a_model(sparsebit: Sparsebit, config: Path) -> None:
    config.write_text(RIGHT)
    for option in (["--model-args", "[3]"], ["--data", "own_project:calls"]):
        answer = sparsebit("config", "check", "config.yaml", *option)
        assert answer.code == 2 and "needs --model" in answer.err


OWN_OPTIONS = """
from pydantic import Field
from torch import nn

from sparsebit.quantization import Observer, Section, register_observer
from sparsebit.quantization.observers.statistics import MinMax


class PartOptions(Section):
    PART: float = Field(0.5, gt=0, le=1)


@register_observer("part", options=PartOptions)
class Part(Observer[MinMax]):
    def new_statistic(self):
        return MinMax()

    def range_of(self, statistic):
        low, high = statistic.range()
        return self.options.PART * low, self.options.PART * high


def net():
    return nn.Sequential(nn.Linear(3, 3))
"""


def test_options_that_the_models_module_registers(sparsebit: Sparsebit, config: Path) -> None:
    (config.parent / "own_options.py").write_text(OWN_OPTIONS)
    written = "W: {QUANTIZER: {BIT: 8}}\nA: {QUANTIZER: {BIT: 8}, OBSERVER: {TYPE: part, PART: {PART: %s}}}\n"
    config.write_text(written % 0.25)
    answer = sparsebit("config", "check", "config.yaml", "-m", "own_options:net", "--full")
    assert answer.code == 0 and "      PART: 0.25\n" in answer.out and "      PART: 0.5\n" in answer.out
    config.write_text(written % 2)
    answer = sparsebit("config", "check", "config.yaml", "-m", "own_options:net")
    assert answer.code == 1 and "A.OBSERVER.PART.PART=2: allowed: a number, above 0, at most 1" in answer.err
