"""`sparsebit graph`: Mermaid to stdout or to a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Sparsebit

COMMAND = ("graph", "--model", "own_project:Net", "--config", "virtual")


def test_stdout_is_the_diagram_alone(sparsebit: Sparsebit, project: Path) -> None:
    answer = sparsebit(*COMMAND)
    assert answer.code == 0, answer.err
    assert answer.out.startswith("flowchart TD\n") and "stem.0" in answer.out and ":::quantized" in answer.out


@pytest.mark.parametrize(
    ("name", "first"), [("graph.mmd", "flowchart TD"), ("graph.md", "```mermaid")], ids=["mermaid", "markdown"]
)
def test_file(sparsebit: Sparsebit, project: Path, name: str, first: str) -> None:
    answer = sparsebit(*COMMAND, "-o", name)
    assert answer.code == 0 and answer.out == "" and answer.err == f"wrote {name}\n"
    assert Path(name).read_text().splitlines()[0] == first


def test_json(sparsebit: Sparsebit, project: Path) -> None:
    record = sparsebit(*COMMAND, "--json").json
    assert (
        record["mermaid"].startswith("flowchart TD\n") and record["backend"] == "virtual" and record["output"] is None
    )


def test_example(sparsebit: Sparsebit, project: Path) -> None:
    command = ("graph", "-m", "own_project:Optional", "-c", "virtual")
    assert "n_scale" not in sparsebit(*command).out
    assert "n_scale" in sparsebit(*command, "-d", "own_project:calls").out


def test_model_arguments(sparsebit: Sparsebit, project: Path) -> None:
    assert "out_features=3" in sparsebit(*COMMAND, "--model-args", "[3]").out
