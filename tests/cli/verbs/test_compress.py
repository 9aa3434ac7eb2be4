"""`sparsebit compress`: the ladder while it runs, the files it leaves, the commands that go on, and what is refused."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typer import BadParameter

from sparsebit.cli.options import read_limits
from sparsebit.records.ladder import Ladder
from tests.cli.conftest import Sparsebit

COMPRESS = ("compress", "--model", "own_project:Net", "--data", "own_project:batches", "-t", "virtual", "-o", "run")


@pytest.fixture(autouse=True)
def packages() -> None:
    for package in ("scipy", "onnxruntime", "onnxscript"):
        pytest.importorskip(package)


def test_the_best_file_and_how_to_make_it_again(sparsebit: Sparsebit, project: Path) -> None:
    answer = sparsebit(*COMPRESS[:-1], "my run", "--rungs", "eight bits", "--max-loss", "50")
    assert answer.code == 0, answer.err
    assert "01-w8: within" in answer.err and "of the bytes" in answer.err
    assert "goal" in answer.out and "met" in answer.out and "sparsebit report 'my run'" in answer.err
    again = next(line for line in answer.err.splitlines() if "sparsebit quantize" in line)
    words = shlex.split(again[again.index("sparsebit quantize") :].partition("#")[0])
    made = sparsebit(*[word.replace("FILE.onnx", "again.onnx") for word in words[1:]])
    assert made.code == 0, made.err
    assert Path("again.onnx").is_file() and Path("my run/best.onnx").is_file()


def test_the_answer_as_json_is_the_ladder(sparsebit: Sparsebit, project: Path) -> None:
    answer = sparsebit(*COMPRESS, "--rungs", "eight bits", "--max-loss", "50", "--json")
    assert answer.code == 0, answer.err
    ladder = Ladder.from_json(Path("run/ladder.json").read_text(), "run/ladder.json")
    assert answer.json["best"] == ladder.best == "01-w8" and answer.json["met"] and ladder.finished
    repeated = sparsebit(*COMPRESS, "--rungs", "eight bits", "--max-loss", "50", "--json")
    assert repeated.json["steps"] == answer.json["steps"], "a finished run is read, not repeated"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--budget", "bytes"), "write NAME=LIMIT"),
        (("--budget", "weight=0.5"), "allowed for networks: latency, bytes, macs"),
        (("--budget", "latency=0.5"), "do not run here"),
        (("--metric", "accuracy"), "give --test-data"),
        (("--metric", "bleu"), "accuracy, agreement or MODULE:FUNCTION"),
        (("--rungs", "nine bits"), "eight bits"),
    ],
)
def test_what_is_refused(sparsebit: Sparsebit, project: Path, options: tuple[str, ...], told: str) -> None:
    answer = sparsebit(*COMPRESS, *options)
    assert answer.code in (1, 2) and told in answer.err and not Path("run/ladder.json").exists()


def test_a_folder_of_something_else_is_refused(sparsebit: Sparsebit, project: Path) -> None:
    Path("run").mkdir()
    Path("run/thesis.txt").write_text("mine")
    answer = sparsebit(*COMPRESS)
    assert answer.code == 1 and "not a run of compress" in answer.err and Path("run/thesis.txt").exists()


def test_budgets_are_read_once_each() -> None:
    assert read_limits(["bytes=4MB", "latency=0.5"]) == {"bytes": "4MB", "latency": "0.5"}
    with pytest.raises(BadParameter, match="given twice"):
        read_limits(["bytes=1", "bytes=2"])
