from __future__ import annotations

from pathlib import Path

import pytest

from sparsebit.records import write_record
from sparsebit.records.ladder import Ladder, LadderGoal
from sparsebit.report.read_ladder import goal_words, run_of_folder, run_of_ladder
from tests.report.made_runs import LADDER, RECORD


def test_the_numbers_at_the_top_and_whether_the_goal_is_met() -> None:
    run = run_of_ladder(LADDER, "run")
    cards = {card.label: card for card in run.cards}
    assert run.met and run.reason == LADDER.reason and run.reproduce == LADDER.reproduce
    accuracy = cards["Top-1 accuracy"]
    assert (accuracy.value, accuracy.before, accuracy.is_good) == ("91.70", "92.00", True)
    assert "that the selection never saw" in accuracy.note
    assert (cards["Time of a call"].value, cards["Size of the file"].share) == ("0.6 ms", 0.3)


def test_steps_with_verdict_loss_and_recipe() -> None:
    first, second, third, _ = run_of_ladder(LADDER, "run").steps
    assert first.is_best and first.is_pareto and (first.loss, first.bound) == (0.3, 0.3)
    assert not second.is_best and second.verdict == "too much loss"
    assert third.loss is None and third.latency is None and third.fault == "no kernel"
    assert first.recipe is not None and set(first.recipe) == {"best.yaml", "placement.json"}


def test_a_budget_is_a_limit_of_the_plot_and_of_its_card() -> None:
    goal = LadderGoal("onnxruntime", "top-1 accuracy", None, {"bytes": 0.2}, "loss", 5.0)
    run = run_of_ladder(LADDER.replace(goal=goal), "run")
    assert (run.cost_name, run.max_cost, run.max_loss) == ("bytes", 0.2, None)
    assert [card.is_good for card in run.cards if card.label == "Size of the file"] == [False]


def test_a_search_without_any_candidate() -> None:
    run = run_of_ladder(LADDER.replace(steps=(), best="", met=False, pareto=(), reason="", finished=False), "run")
    assert not run.cards and run.reason == "the search has not finished" and run.met is False


@pytest.mark.parametrize(
    ("max_loss", "budget", "prefer", "words"),
    [
        (0.5, {}, "latency", "the fastest file for openvino with at most 0.5 lost of top-1"),
        (None, {"bytes": 4e6}, "loss", "the most accurate file for openvino with bytes at most 4e+06 bytes"),
        (1.0, {}, "macs", "the smallest file for openvino with at most 1 lost of top-1"),
    ],
)
def test_the_goal_in_words(max_loss: float | None, budget: dict[str, float], prefer: str, words: str) -> None:
    assert goal_words(LadderGoal("openvino", "top-1", max_loss, budget, prefer, 5.0)) == words  # type: ignore[arg-type]


def test_the_folder_adds_the_layers_of_the_best_file(tmp_path: Path) -> None:
    (tmp_path / "ladder.json").write_text(LADDER.to_json())
    assert not run_of_folder(tmp_path, LADDER).layers
    write_record(tmp_path / "record.json", RECORD)
    run = run_of_folder(tmp_path, Ladder.from_json(LADDER.to_json()))
    assert len(run.layers) == 6 and run.steps and run.drawing is not None
    assert [card.label for card in run.cards] == [
        "Top-1 accuracy", "Time of a call", "Size of the file", "Output SQNR", "In integers"
    ]  # fmt: skip
