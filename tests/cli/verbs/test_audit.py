"""`sparsebit audit`: the table, the verdict, the record, and what is said when something is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from sparsebit.cli.verb_options import read_shape
from tests.cli.conftest import Sparsebit

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from tests.deploy.tiny_files import Tiny


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four convolutions whose outputs are read by float adds, and one in integers; the batch is open."""
    monkeypatch.chdir(tmp_path)
    t = Tiny(("batch", 8, "height", "width"))
    y = t.quantized(t.conv(t.quantized("x"), "stem"))
    for number in range(4):
        y = t.quantized(t.node("Add", [t.conv(y, f"conv{number}"), y], f"add{number}"))
    return t.save(Path("slow.onnx"), y)


def test_table_and_verdict(sparsebit: Sparsebit, slow: Path) -> None:
    answer = sparsebit("audit", slow, "--repeats", 1, "--shape", "x=1x8x8x8")
    assert answer.code == 0, answer.err
    assert answer.err.startswith("auditing slow.onnx in onnxruntime, 1 thread\n")
    lines = answer.out.splitlines()
    assert "layers     4 float, 1 integer" in answer.out and "x float32 1x8x8x8, random normal" in answer.out
    assert any(line.strip().startswith("conv0 [Conv]") and "its output is read" in line for line in lines)
    assert "and 1 more" in answer.out
    assert "4 of 5 convolutions are not in integers, because their output is read by a float add" in " ".join(
        answer.out.split()
    )


def test_without_timing(sparsebit: Sparsebit, slow: Path) -> None:
    answer = sparsebit("audit", slow, "--repeats", 0)
    assert answer.code == 0 and "CPU time" not in answer.out and "inputs" not in answer.out
    assert "\n4 of 5 convolutions are not in integers" in answer.out


def test_quiet_gives_the_verdict_alone(sparsebit: Sparsebit, slow: Path) -> None:
    answer = sparsebit("audit", slow, "--repeats", 0, "-q")
    assert answer.out.startswith("4 of 5 convolutions") and "auditing" not in answer.err


def test_json(sparsebit: Sparsebit, slow: Path) -> None:
    answer = sparsebit("audit", slow, "--repeats", 2, "--shape", "x=1x8x8x8", "--threads", 2, "--json")
    record = answer.json
    assert record["counts"] == {"integer": 1, "float": 4} and record["num_threads"] == 2
    assert record["ratio"] == record["latency"]["quantized"]["wall_ratio"] and record["float_source"] == "twin"
    assert isinstance(record["warnings"], list) and record["verdict"]


def test_against_and_openvino(sparsebit: Sparsebit, slow: Path) -> None:
    pytest.importorskip("openvino")
    options = ["--against", slow, "--runtime", "openvino", "--repeats", 1, "--shape", "x=1x8x8x8"]
    answer = sparsebit("audit", slow, *options)
    assert answer.code == 0, answer.err
    assert "slow.onnx" in answer.out and "openvino" in answer.out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["none.onnx"], "none.onnx: no such file"),
        (["slow.onnx", "--runtime", "tensorrt"], "allowed: onnxruntime, openvino"),
        (["slow.onnx", "--shape", "y=1x8"], "input 'y': the file has none of this name; it has x"),
        (["slow.onnx", "--shape", "x=1x7x8x8"], "the file takes batchx8xheightxwidth"),
    ],
)
def test_faults(sparsebit: Sparsebit, slow: Path, arguments: list[str], told: str) -> None:
    del slow
    answer = sparsebit("audit", *arguments)
    assert answer.code == 1 and told in answer.err and answer.out == ""


def test_shape() -> None:
    assert read_shape("pixel=values=1x3x2x2") == ("pixel=values", (1, 3, 2, 2))
    for wrong in ("1x3", "x=", "x=1x0", "x=axb"):
        with pytest.raises(typer.BadParameter, match="write the input's name"):
            read_shape(wrong)
