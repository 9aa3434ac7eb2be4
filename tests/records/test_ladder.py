"""The ladder of a search as JSON: nothing is lost, and anything else is an error that names the file."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from sparsebit.errors import RecordError
from sparsebit.records.ladder import VERSION, Cost, Judgement, Ladder
from tests.records.random_records import values_of
from tests.report.made_runs import LADDER


def test_round_trip() -> None:
    again = Ladder.from_json(LADDER.to_json())
    assert again == LADDER and isinstance(again.steps, tuple) and isinstance(again.pareto, tuple)


def test_round_trip_of_a_language_model() -> None:
    cost = Cost(4_000_000, 0.28, 0, 1.0, bits=4.5)
    first = replace(LADDER.steps[0], cost=cost, recipe={"target": "vllm", "options": {"candidate_bits": [4, 8]}})
    goal = replace(LADDER.goal, budget={"bits": 4.6}, prefer="loss", max_loss=None)
    ladder = LADDER.replace(goal=goal, float_cost=Cost(14_000_000, 1.0, 0, 1.0, bits=16.0), steps=(first,))
    again = Ladder.from_json(ladder.to_json())
    assert again == ladder and again.steps[0].cost == cost and again.goal.budget == {"bits": 4.6}
    assert again.steps[0].cost.latency is None  # type: ignore[union-attr]


@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(ladder=values_of(Ladder))
def test_round_trip_of_any_ladder(ladder: Ladder) -> None:
    assert Ladder.from_json(ladder.to_json()) == ladder


def test_a_step_by_its_name() -> None:
    assert LADDER.step("02-w4") is LADDER.steps[1]


def test_a_ladder_without_bits_is_read() -> None:
    """As versions before searches of language models wrote it."""
    values = json.loads(LADDER.to_json())
    for cost in (values["float_cost"], *(step["cost"] for step in values["steps"] if step["cost"])):
        del cost["bits"]
    assert Ladder.from_json(json.dumps(values)) == LADDER


def changed(**values: Any) -> str:
    return json.dumps({**json.loads(LADDER.to_json()), **values})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "r.json is damaged"),
        (LADDER.to_json()[:-9], "r.json is damaged"),
        ("[" * 100_000, "r.json is damaged"),
        ("[]", "r.json is not a ladder"),
        ('{"format": "sparsebit-record"}', "r.json is not a ladder of `sparsebit compress`; name the folder of a run"),
        (changed(version=VERSION + 1), f"r.json has version {VERSION + 1}; this Sparsebit reads version {VERSION}"),
        (changed(version=None), "r.json has version None"),
        (changed(colour="red"), r"r.json is damaged or was written by another program: ladder\.colour: unknown key"),
        (changed(steps=[{"name": "01"}]), r"another program: ladder\.steps\[0\]"),
        (changed(best=1), r"another program: ladder\.best"),
    ],
    ids=["empty", "cut", "deep", "list", "record", "newer", "no version", "unknown key", "torn step", "wrong type"],
)
def test_files_that_are_none(text: str, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        Ladder.from_json(text, "r.json")


@pytest.mark.parametrize(
    ("count", "bound", "words"),
    [
        (50, 0.26, "loses 1.20 ± 0.26 points on 50 samples"),
        (50, None, "loses 1.20 points on 50 samples"),
        (0, None, "loses 1.20 points"),  # a metric of one number, with data of its own
    ],
)
def test_a_judgement_in_words(count: int, bound: float | None, words: str) -> None:
    assert str(Judgement("m", "points", count, 90.0, 88.8, 1.2, bound, is_decided=True)) == words
