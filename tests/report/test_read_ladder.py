from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sparsebit.records import write_record
from sparsebit.records.ladder import Cost, Ladder, LadderGoal
from sparsebit.report.read_ladder import goal_words, run_of_folder, run_of_ladder
from tests.report.made_runs import LADDER, LANGUAGE_LADDER, RECORD


def test_the_numbers_at_the_top_and_whether_the_goal_is_met() -> None:
    run = run_of_ladder(LADDER, "run")
    cards = {card.label: card for card in run.cards}
    assert run.met and run.reason == LADDER.reason and run.reproduce == LADDER.reproduce
    accuracy = cards["Top-1 accuracy"]
    assert (accuracy.value, accuracy.before, accuracy.is_good) == ("91.70 %", "92.00 %", True)
    assert "0.30 ± 0.3 points lost, on 500 samples that had no influence on the choice" in accuracy.note
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
    assert not run.cards and run.reason == "the search has not finished" and run.met is None


@pytest.mark.parametrize(
    ("max_loss", "budget", "prefer", "words"),
    [
        (0.5, {}, "latency", "the fastest file for openvino with at most 0.5 points of top-1 lost"),
        (None, {"bytes": 4e6}, "loss", "the most accurate file for openvino with bytes at most 4 MB"),
        (1.0, {}, "macs", "the smallest file for openvino with at most 1 points of top-1 lost"),
    ],
)
def test_the_goal_in_words(max_loss: float | None, budget: dict[str, float], prefer: str, words: str) -> None:
    goal = LadderGoal("openvino", "top-1", max_loss, budget, prefer, 5.0)  # type: ignore[arg-type]
    assert goal_words(goal, "points") == words


def test_the_folder_adds_the_layers_of_the_best_file(tmp_path: Path) -> None:
    (tmp_path / "ladder.json").write_text(LADDER.to_json())
    assert not run_of_folder(tmp_path, LADDER).layers
    write_record(tmp_path / "record.json", RECORD)
    run = run_of_folder(tmp_path, Ladder.from_json(LADDER.to_json()))
    assert len(run.layers) == 6 and run.steps and run.drawing is not None
    assert [card.label for card in run.cards] == [
        "Top-1 accuracy", "Time of a call", "Size of the file", "Output SQNR", "In integers"
    ]  # fmt: skip


def test_a_search_for_a_language_model() -> None:
    run = run_of_ladder(LANGUAGE_LADDER, "llama")
    cards = {card.label: card for card in run.cards}
    assert run.goal == "the smallest file for transformers with at most 1 % of perplexity lost"
    assert (cards["Perplexity"].value, cards["Perplexity"].before) == ("33.41", "33.12")  # exp(3.509), exp(3.5)
    assert (cards["Bits of a weight"].value, cards["Bits of a weight"].before) == ("4.20", "16")
    assert "Time of a call" not in cards and "Multiplications" not in cards
    assert run.cost_name == "bits" and [step.bits for step in run.steps] == [8.2, 4.2, 3.2]
    assert all(step.latency is None and step.macs is None for step in run.steps)
    assert run.steps[1].recipe == {"recipe": "sparsebit.llm.recipe_for('transformers', candidate_bits=(3, 4))"}


def test_divergence_is_shown_in_nats() -> None:
    steps = tuple(
        replace(step, selection=replace(step.selection, metric="KL to the float model", unit="hundredths of a nat"))
        for step in LANGUAGE_LADDER.steps
        if step.selection is not None
    )
    card = run_of_ladder(LANGUAGE_LADDER.replace(steps=steps), "llama").cards[0]
    assert (card.label, card.value, card.before) == ("KL to the float model", "3.5090 nats", "")


@pytest.mark.parametrize(
    ("budget", "limit"),
    [({"bits": 4.5}, 4.5), ({"bytes": 32e6}, 0.5), ({"bytes": 0.25}, 0.25)],
    ids=["bits", "bytes", "share"],
)
def test_budgets_are_lines_of_the_plot(budget: dict[str, float], limit: float) -> None:
    goal = LadderGoal("transformers", "perplexity", None, budget, "loss", 5.0)
    assert run_of_ladder(LANGUAGE_LADDER.replace(goal=goal), "llama").max_cost == limit


def test_a_search_that_goes_on_has_neither_met_nor_missed_its_goal() -> None:
    assert run_of_ladder(LADDER.replace(met=False, finished=False), "run").met is None
    assert run_of_ladder(LADDER.replace(met=False), "run").met is False


def test_multiplications_are_shown_where_any_are_saved() -> None:
    assert all(step.macs is None for step in run_of_ladder(LADDER, "run").steps)
    fewer = replace(LADDER.steps[0], cost=Cost(500, 0.5, 400, 0.8))
    steps = run_of_ladder(LADDER.replace(steps=(fewer, *LADDER.steps[1:])), "run").steps
    assert [step.macs for step in steps] == [0.8, 1.0, None, 1.0]
