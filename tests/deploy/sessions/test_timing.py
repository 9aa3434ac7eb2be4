"""`interleaved`: the order of calls, the numbers of rounds, the shape of the result; never how long anything takes."""

from __future__ import annotations

import json
import math

import pytest

from sparsebit.deploy.sessions import timing
from sparsebit.deploy.sessions.timing import interleaved


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def one_call_per_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_MIN_SAMPLE_S", 0)


@pytest.mark.usefixtures("one_call_per_round")
def test_turns_go_forth_and_back(calls: list[str]) -> None:
    interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, num_rounds=3, warmup=2)
    warmup, rounds = calls[:6], calls[6:]
    assert warmup == ["a", "a", "a", "b", "b", "b"]  # two calls, and one that tells how long it takes
    assert rounds == ["a", "b", "b", "a", "a", "b"]


def test_short_calls_are_measured_in_bunches(calls: list[str]) -> None:
    latency = interleaved({"a": lambda: calls.append("a")}, num_rounds=2, warmup=0)["a"]
    assert latency.calls_per_round > 1 and len(calls) == 1 + 2 * latency.calls_per_round


def test_budget_spent_still_gives_the_least_number_of_rounds() -> None:
    latency = interleaved({"a": lambda: None, "b": lambda: None}, budget_s=0, min_rounds=4)
    assert [one.num_rounds for one in latency.values()] == [4, 4]


def test_first_run_is_what_the_others_are_compared_with() -> None:
    latency = interleaved({"float": lambda: sum(range(3000)), "int8": lambda: sum(range(1000))}, num_rounds=5)
    assert list(latency) == ["float", "int8"]
    assert latency["float"].wall_ratio == latency["float"].cpu_ratio == 1
    for one in latency.values():
        assert one.wall_quartiles_ms[0] <= one.wall_ms <= one.wall_quartiles_ms[1]
        assert one.cpu_quartiles_ms[0] <= one.cpu_ms <= one.cpu_quartiles_ms[1]


def test_single_round() -> None:
    latency = interleaved({"a": lambda: None}, num_rounds=1)["a"]
    assert latency.wall_quartiles_ms == (latency.wall_ms, latency.wall_ms)


def test_clock_that_stands_still_gives_no_ratio() -> None:
    assert math.isnan(timing._ratio([1.0], [0.0])) and timing._ratio([1.0, 3.0], [2.0, 2.0]) == 1


def test_nothing_to_time() -> None:
    assert interleaved({}) == {}


def test_goes_to_json() -> None:
    record = json.loads(json.dumps(interleaved({"a": lambda: None}, num_rounds=1)["a"].to_dict()))
    assert set(record) >= {"wall_ms", "cpu_ms", "wall_ratio", "num_rounds"}
