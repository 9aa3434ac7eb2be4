"""`sparsebit prune`: a folder that rebuilds from the original class, sizes before and after, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sparsebit.cli.loading import load_model
from sparsebit.sparse import load
from tests.sparse.fake_runtime import ByMultiplications, layer_sizes

if TYPE_CHECKING:
    from tests.cli.conftest import Sparsebit

MODEL = ("prune", "--model", "own_project:Net", "--device", "cpu", "-o", "small")
DATA = ("--data", "own_project:batches")


@pytest.mark.parametrize("how", [("--ratio", "0.5"), ("--ratio", "0.5", *DATA), ("--budget", "macs=0.6", *DATA)])
def test_the_folder_rebuilds_from_the_original_class(sparsebit: Sparsebit, project: Path, how: tuple[str, ...]) -> None:
    if "--budget" in how:
        pytest.importorskip("scipy")
    answer = sparsebit(*MODEL, *how, "--json")
    assert answer.code == 0, answer.err
    told = answer.json
    assert told["after"]["macs"] < 0.8 * told["before"]["macs"] and told["units"]["removed"] > 0
    assert (told["output_sqnr_db"]["pruned"] is not None) == ("--data" in how)
    small = load("small", load_model("own_project:Net"))
    assert sum(p.numel() for p in small.parameters()) == told["after"]["parameters"]
    if "--budget" in how:
        assert told["after"]["macs"] <= 0.6 * told["before"]["macs"] and told["ratios"]


def test_a_budget_of_latency_is_measured(sparsebit: Sparsebit, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("scipy", "onnxruntime"):
        pytest.importorskip(package)
    monkeypatch.setattr("sparsebit.sparse.latency_table.onnx_bytes", layer_sizes)
    monkeypatch.setattr("sparsebit.sparse.latency_table.Stopwatch", lambda *_: ByMultiplications())
    answer = sparsebit(*MODEL, *DATA, "--budget", "latency=0.6", "--json")
    assert answer.code == 0, answer.err
    assert answer.json["latency"]["asked"] == 0.6 and answer.json["latency"]["ratio"] < 0.7
    assert "of the dense model's" in sparsebit(*MODEL, *DATA, "--budget", "latency=0.6").out


def test_a_table_is_shown(sparsebit: Sparsebit, project: Path) -> None:
    answer = sparsebit(*MODEL, "--ratio", "0.5", *DATA)
    assert answer.code == 0, answer.err
    assert all(word in answer.out for word in ("MACs", "parameters", "bytes", "removed", "saved"))


def test_configs_are_read(sparsebit: Sparsebit, project: Path) -> None:
    Path("sconfig.yaml").write_text("SPARSER: {TYPE: structed, STRATEGY: l2norm, RATIO: 0.25}\n")
    answer = sparsebit(*MODEL, "-c", "sconfig.yaml", "--json")
    assert answer.code == 0, answer.err
    share = answer.json["units"]["removed"] / answer.json["units"]["removable"]
    assert share == pytest.approx(0.25, abs=0.1)


def test_what_makes_no_sense_is_refused(sparsebit: Sparsebit, project: Path) -> None:
    assert "how much is to go" in " ".join(sparsebit(*MODEL).err.split())
    assert "chosen on data" in " ".join(sparsebit(*MODEL, "--budget", "macs=0.5").err.split())
    assert "give --ratio, or --budget" in " ".join(
        sparsebit(*MODEL, *DATA, "--ratio", "0.5", "--budget", "macs=0.5").err.split()
    )
    answer = sparsebit(*MODEL, "--ratio", "0.5", "--strategy", "l1nrm")
    assert answer.code == 1 and "l1norm" in answer.err
    Path("sconfig.yaml").write_text("SPARSER: {TYPE: unstructed, RATIO: 0.25}\n")
    answer = sparsebit(*MODEL, "-c", "sconfig.yaml")
    assert answer.code == 1 and "TYPE: structured" in answer.err
    Path("small").mkdir()
    Path("small/mine.txt").write_text("mine")
    answer = sparsebit(*MODEL, "--ratio", "0.5")
    assert answer.code == 1 and "something else" in answer.err and Path("small/mine.txt").exists()
