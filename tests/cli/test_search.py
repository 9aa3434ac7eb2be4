from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.cli.conftest import Sparsebit

pytest.importorskip("scipy")
COMMAND = (
    "search",
    "--model",
    "own_project:Net",
    "--data",
    "own_project:batches",
    "--device",
    "cpu",
    "-o",
    "found.yaml",
)


def test_writes_a_config_that_quantize_takes(sparsebit: Sparsebit, project: Path) -> None:
    answer = sparsebit(*COMMAND, "--budget", "bytes=0.6", "--candidate-bits", "2,4,8", "--json")
    assert answer.code == 0, answer.err
    budget = answer.json["budgets"]["bytes"]
    assert budget["spent"] <= budget["limit"] and set(answer.json["bits"].values()) <= {2, 4, 8}
    made = sparsebit("quantize", *COMMAND[1:5], "-c", "found.yaml", "-o", "saved", "--json")
    assert made.code == 0, made.err
    assert made.json["weight_bytes"]["quantized"] == budget["spent"]


def test_budgets_without_sense(sparsebit: Sparsebit, project: Path) -> None:
    assert "write NAME=NUMBER" in sparsebit(*COMMAND, "--budget", "bytes").err
    answer = sparsebit(*COMMAND, "--budget", "weight_bits=1")
    assert answer.code == 1 and "is the least that the options reach" in answer.err
    assert not Path("found.yaml").exists()
