from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Sparsebit

pytest.importorskip("scipy")
COMMAND = (
    "search", "--model", "own_project:Net", "--data", "own_project:batches", "--device", "cpu", "-o", "found.yaml",
)  # fmt: skip


def test_writes_a_config_that_quantize_takes(sparsebit: Sparsebit, project: Path) -> None:
    answer = sparsebit(*COMMAND, "--budget", "bytes=0.6", "--candidate-bits", "2,4,8", "--json")
    assert answer.code == 0, answer.err
    budget = answer.json["budgets"]["bytes"]
    assert budget["spent"] <= budget["limit"] and set(answer.json["bits"].values()) <= {2, 4, 8}
    made = sparsebit("quantize", *COMMAND[1:5], "-c", "found.yaml", "-o", "saved", "--json")
    assert made.code == 0, made.err
    assert made.json["weight_bytes"]["quantized"] == budget["spent"]


def test_budgets_without_sense(sparsebit: Sparsebit, project: Path) -> None:
    assert "write NAME=LIMIT" in sparsebit(*COMMAND, "--budget", "bytes").err
    assert "write NAME=NUMBER" in sparsebit(*COMMAND, "--budget", "bytes=much").err
    assert "bytes is given twice" in sparsebit(*COMMAND, "--budget", "bytes=0.5", "--budget", "bytes=0.3").err
    answer = sparsebit(*COMMAND, "--budget", "weight_bits=1")
    assert answer.code == 1 and "is the least that the options reach" in answer.err
    assert not Path("found.yaml").exists()


LATENCY = (*COMMAND[:-1], "fast.json")


@pytest.mark.slow
def test_latency_gives_a_placement_that_quantize_takes(sparsebit: Sparsebit, project: Path) -> None:
    pytest.importorskip("onnxruntime")
    answer = sparsebit(*LATENCY, "--latency", "1000", "--latency", "2000", "--budget", "bytes=0.9", "--json")
    assert answer.code == 0, answer.err
    assert [one["output"] for one in answer.json["searches"]] == ["fast-1000.json", "fast-2000.json"]
    assert {"ratio", "predicted", "default_ratio", "floats"} <= answer.json["searches"][0].keys()
    made = sparsebit("quantize", *COMMAND[1:5], "--placement", "fast-1000.json", "-o", "saved", "--json")
    assert made.code == 0, made.err


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([], "--budget, as bytes=0.5, or a --latency"),
        (["--latency", "0"], "above 0"),
        (["--latency", "0.5", "--budget", "weight_bits=4"], "weight_bits: cannot be combined with --latency"),
        (["--latency", "0.5", "-o", "fast.yaml"], "name a .json file"),
        (["--latency", "0.5", "--candidate-bits", "4,8"], "--candidate-bits"),
        (["--latency", "0.5", "--activation-bits", "4,8"], "--activation-bits"),
    ],
    ids=["nothing", "zero", "other budgets", "yaml", "candidates", "activations"],
)
def test_latency_that_is_refused(sparsebit: Sparsebit, project: Path, given: list[str], told: str) -> None:
    answer = sparsebit(*LATENCY, *given)
    assert answer.code == 2 and told in " ".join(answer.err.replace("│", " ").split())
