"""The result in words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sparsebit.compress.climbing.conclusion import cost_words, reason_for
from sparsebit.records.ladder import Cost
from tests.compress.made import FLOAT, goal, judged, ladder, step

LOSING: dict[str, Any] = {"loss": 3.0, "verdict": "too much loss"}
FAILED: dict[str, Any] = {"loss": None, "cost": None, "verdict": "failed", "fault": "DeploymentError: no kernel"}


@pytest.mark.parametrize(
    ("cost", "words"),
    [
        (Cost(1, 0.25, 10, 1.0, 2.0, 0.5), "0.50 of the time and 0.250 of the bytes"),
        (Cost(1, 0.25, 10, 1.0), "0.250 of the bytes"),
        (Cost(1, 0.25, 10, 0.6), "0.250 of the bytes and 0.60 of the multiplications"),
        (
            Cost(1, 0.25, 10, 0.6, 2.0, 0.5),
            "0.50 of the time, 0.250 of the bytes and 0.60 of the multiplications",
        ),
        (Cost(1, 0.25, 0, 1.0, bits=4.125), "0.250 of the bytes"),
    ],
)
def test_shares_of_the_float_file(cost: Cost, words: str) -> None:
    assert cost_words(cost) == words


def test_a_goal_that_is_met() -> None:
    found = ladder(goal(), step("01-w8", final=judged(0.4, 0.2, 256)), met=True)
    assert reason_for(found) == (
        "01-w8 loses 0.40 ± 0.2 points on 256 samples that selection never saw; "
        "it takes 0.50 of the time and 0.300 of the bytes of the float file"
    )


def test_a_metric_of_one_number_has_no_unseen_samples() -> None:
    found = ladder(goal(), step("01-w8", final=judged(0.4, None, 0)), met=True)
    assert reason_for(found).startswith("01-w8 loses 0.40 points; it takes")


def test_too_much_loss_names_the_limit_and_its_bound() -> None:
    steps = step("01-w8", **LOSING), step("02-w8-mse", **LOSING), step("03-broken", **FAILED)
    assert reason_for(ladder(goal(max_loss=0.5), *steps)) == (
        "2 of 3 candidates lose more than 0.5 ± 0.1 points, 1 of 3 could not be made; the nearest is 01-w8: "
        "it loses 3.00 ± 0.1 points on 100 samples; it takes 0.50 of the time and 0.300 of the bytes of the float file"
        ". Next: train it with train.py"
    )


def test_the_layers_that_cost_the_accuracy() -> None:
    found = reason_for(ladder(goal(), step("01-w8", **LOSING)), ["conv1", "head.fc"])
    assert "it loses 3.00 ± 0.1 points on 100 samples, most of it at conv1, head.fc; it takes 0.50" in found


def test_only_the_budgets_that_are_exceeded_are_named() -> None:
    over = step("01-w8", loss=None, verdict="over budget")
    found = reason_for(ladder(goal(budget={"bytes": 0.2, "latency": 0.9}), over))
    assert found.startswith("1 of 1 take more than the budget of bytes; the nearest is 01-w8: it was not judged, ")
    both = reason_for(ladder(goal(budget={"bytes": 0.2, "latency": 0.4}), over))
    assert "more than the budget of bytes, latency;" in both
    assert both.endswith("Next: allow a larger budget")


def test_what_lost_on_unseen_samples() -> None:
    found = ladder(goal(), step("01-w8", final=judged(2.0)))
    assert "kept the loss in the selection lost more on unseen samples; the nearest is" in reason_for(found)


def test_no_candidate() -> None:
    assert (
        reason_for(ladder(goal(), seconds=1190.0))
        == "no candidate was made; the time ran out before the first one; allow more minutes"
    )
    late = ladder(goal(), step("01-w8", **{**FAILED, "verdict": "out of time", "fault": ""}), best="")
    assert reason_for(late) == "no candidate was made; the time ran out before the first one; allow more minutes"
    assert "no rung proposes one for this goal" in reason_for(ladder(goal(), seconds=2.0))
    assert "was stopped before the first one; repeat the call" in reason_for(ladder(goal(), finished=False))
    failed = ladder(goal(), step("01-w8", **FAILED), best="")
    assert reason_for(failed) == "no candidate was made; all 1 failed: DeploymentError: no kernel"


def test_a_stopped_search_says_how_it_goes_on() -> None:
    found = ladder(goal(), step("01-w8", **LOSING), finished=False)
    assert ". The search was stopped; repeat the call to continue. Next: train it" in reason_for(found)


def test_a_language_model_is_advised_more_bits() -> None:
    language = replace(FLOAT, bits=16.0, latency=None)
    found = reason_for(ladder(goal(), step("01-w4", **LOSING), float_cost=language))
    assert found.endswith("Next: allow more bits") and "train.py" not in found


def test_bits_of_a_language_model() -> None:
    cost = Cost(1, 0.25, 0, 1.0, bits=4.125)
    found = reason_for(ladder(goal(), step("01-w4", cost=cost, final=judged(-0.4)), met=True))
    assert found.startswith("01-w4 gains 0.40 ± ")
    assert found.endswith("it takes 0.250 of the bytes of the float file, 4.12 bits a weight")
