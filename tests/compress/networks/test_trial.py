"""One candidate: its files, its cost, its judgement, and the model that is read back from its folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

from sparsebit.compress.networks.bench import Bench
from sparsebit.compress.networks.recipe import Recipe
from sparsebit.compress.networks.trial import MODEL, RECORD, SMALL, NetworkTrials, load
from sparsebit.deploy.comparing.file_model import FileModel
from sparsebit.quantization.quant_config import as_qconfig
from sparsebit.records import read_record
from sparsebit.records.ladder import LadderStep
from sparsebit.sparse.sparse_config import parse_sconfig
from tests.compress.made import goal
from tests.compress.made import step as made_step
from tests.compress.nets import batches
from tests.compress.networks.benches import bench as made_bench

FILE = "model.onnx"

HALF = parse_sconfig("{SPARSER: {TYPE: structured, RATIO: 0.5}}")


def begun(name: str) -> LadderStep:
    return made_step(name, cost=None, loss=None, verdict="out of time")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return made_bench(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def pruned(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> tuple[LadderStep, Path]:
    folder = tmp_path_factory.mktemp("pruned")
    recipe = Recipe(as_qconfig("onnxruntime"), sconfig=HALF)
    return NetworkTrials(bench).made(recipe, begun("01-channels"), folder, None), folder


def test_the_step_has_what_was_measured_and_the_folder_its_files(bench: Bench, pruned: tuple[LadderStep, Path]) -> None:
    step, folder = pruned
    assert {path.name for path in folder.iterdir()} == {FILE, MODEL, RECORD, SMALL}
    assert step.cost is not None and step.cost.num_bytes == (folder / FILE).stat().st_size
    assert step.cost.bytes_ratio == step.cost.num_bytes / bench.float_cost.num_bytes < 1
    assert step.cost.macs_ratio == step.cost.macs / bench.float_cost.macs < 0.7
    assert step.cost.latency is not None and "in onnxruntime" in step.parity
    assert step.selection is not None and step.selection.num_samples == 32
    assert step.verdict == "too much loss" and step.selection.loss > bench.goal.max_loss == 1.0
    made = read_record(folder / RECORD)
    assert made.model is not None and made.model.name == "01-channels" and made.parity is not None


def test_the_model_in_the_folder_computes_what_the_file_computes(bench: Bench, pruned: tuple[LadderStep, Path]) -> None:
    step, folder = pruned
    net, qmodel = load(bench, step, folder)
    assert net.get_parameter("conv2.weight").shape[0] == 12 and not net.training
    (x,) = batches(32, 11)
    with torch.no_grad():
        assert FileModel(folder / FILE)(x).equal(qmodel(x))


def test_the_final_judgement_is_of_the_file_on_other_samples(bench: Bench, pruned: tuple[LadderStep, Path]) -> None:
    step, folder = pruned
    final = NetworkTrials(bench).concluded(step, folder)
    assert final.num_samples == 32 and step.selection is not None and final.loss != step.selection.loss


def test_candidates_are_timed_in_turns(bench: Bench, pruned: tuple[LadderStep, Path]) -> None:
    _, folder = pruned
    timed = NetworkTrials(bench).times({"01-a": folder, "02-b": folder})
    assert timed["float"].ratio == 1.0 and {"01-a", "02-b"} < set(timed)
    assert timed["01-a"].ratio > 0 and timed["01-a"].ms > 0


@pytest.fixture(scope="module")
def virtual(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return made_bench(tmp_path_factory.mktemp("virtual"), "virtual")


class TestVerdicts:
    def made(self, virtual: Bench, folder: Path, rejects: float | None = None, **wanted: Any) -> LadderStep:
        bits = as_qconfig("virtual").replace("W.QUANTIZER.BIT", 4)
        changed = replace(virtual, goal=goal("virtual", **wanted))
        return NetworkTrials(changed).made(Recipe(bits), begun("01-w4"), folder, rejects)

    def test_a_file_within_the_loss_for_a_target_that_does_not_run_here(self, virtual: Bench, tmp_path: Path) -> None:
        step = self.made(virtual, tmp_path, max_loss=90.0)
        assert step.verdict == "within" and step.selection is not None
        assert step.cost is not None and step.cost.latency is None
        assert NetworkTrials(virtual).times({"01": tmp_path}) == {}

    def test_a_file_above_the_budget_is_not_judged(self, virtual: Bench, tmp_path: Path) -> None:
        step = self.made(virtual, tmp_path, budget={"macs": 0.5})
        assert step.verdict == "over budget" and step.selection is None and step.cost is not None
        assert (tmp_path / FILE).is_file() and (tmp_path / RECORD).is_file()


@pytest.mark.slow
def test_a_measured_placement_is_kept_in_the_recipe(bench: Bench, tmp_path: Path) -> None:
    recipe = Recipe(as_qconfig("onnxruntime"), placement="measured")
    step = NetworkTrials(bench).made(recipe, begun("01-placed"), tmp_path, None)
    again = Recipe.from_dict(step.recipe)
    assert isinstance(step.recipe["placement"], dict) and again.key == recipe.key
    net, loaded = load(bench, step, tmp_path)
    rebuilt = again.quantized(net, bench.calibration, 1.0)
    assert rebuilt.plan == loaded.plan and rebuilt.placement == again.placement
