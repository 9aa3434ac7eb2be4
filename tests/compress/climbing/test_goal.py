"""Goals: what is allowed, how limits are read, and which candidate is better."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sparsebit.compress.climbing.goal import need_backend, pareto, rank, read_amount, read_goal, used
from sparsebit.errors import ConfigError
from sparsebit.records.ladder import Cost, Judgement, LadderStep


def step(name: str, *, loss: float | None = 0.0, latency: float = 0.5, size: float = 0.3, **more: Any) -> LadderStep:
    judged = None if loss is None else Judgement("m", "points", 10, 90.0, 90.0 - loss, loss, 0.1, is_decided=True)
    cost = Cost(int(1e6 * size), size, 100, 1.0, 2 * latency, latency)
    return LadderStep(
        name, "rung", "why", **{"verdict": "within", **more}, seconds=1.0, folder=name, cost=cost, selection=judged
    )


@pytest.mark.parametrize(
    ("name", "limit", "number"),
    [
        ("bytes", 0.12, 0.12),
        ("bytes", "4MB", 4e6),
        ("bytes", "1 KiB", 1024),
        ("latency", "50%", 0.5),
        ("latency", "3 ms", 3.0),
        ("latency", "2s", 2000.0),
        ("macs", "1.5G", 1.5e9),
        ("macs", 20_000_000, 2e7),
    ],
)
def test_limits(name: str, limit: float | str, number: float) -> None:
    assert math.isclose(read_amount(name, limit), number)


@pytest.mark.parametrize(
    ("name", "limit", "message"),
    [
        ("bytes", 0, "a number above 0"),
        ("bytes", "nan", "a number above 0"),
        ("bytes", "inf", "a number above 0"),
        ("bytes", "4 ms", "a number above 0, as 0.5, or with a unit: %, b"),
        ("bytes", "1e-3.2", "a number above 0"),
        ("latency", "0.5 ms", "give a share"),
        ("bytes", "150 %", "at most 100 %"),
        ("bits", 0.3, "bits of a weight with its scales"),
    ],
)
def test_wrong_limits(name: str, limit: float | str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_amount(name, limit)


def goal(target: str = "onnxruntime", **given: Any) -> Any:
    return read_goal(target, "m", **{"max_loss": None, "budget": None, "prefer": None, "minutes": 1.0, **given})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"minutes": 0.0}, "above 0"),
        ({"minutes": math.nan}, "above 0"),
        ({"max_loss": -1.0}, "from 0 on"),
        ({"max_loss": "half"}, "max_loss='half': give a number"),
        ({"budget": "bytes=0.5"}, "budget='bytes=0.5': give limits by their names"),
        ({"prefer": "speed"}, "allowed for networks: latency, bytes, macs"),
        ({"prefer": "bytes", "budget": {"bytes": 0.5}}, "give one of the two"),
        ({"target": "tensorrt", "prefer": "latency"}, "do not run here"),
        ({"target": "tensorrt", "budget": {"latency": 0.5}}, "do not run here"),
        ({"budget": {"size": 0.5}}, "budget 'size': allowed for networks: latency, bytes, macs"),
        ({"budget": {"latency": 0.5}, "models": "language models"}, "allowed for language models: bytes, bits"),
        ({"prefer": "macs", "models": "language models"}, "allowed for language models: bytes, bits"),
    ],
)
def test_wrong_goals(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        goal(**given)


def test_unknown_targets() -> None:
    with pytest.raises(ConfigError, match="did you mean onnxruntime"):
        need_backend("onxruntime")


def test_defaults() -> None:
    assert (goal().max_loss, goal().prefer) == (1.0, "latency")
    assert goal(target="tensorrt").prefer == "bytes"
    with_budget = goal(budget={"bytes": 0.5})
    assert (with_budget.max_loss, with_budget.prefer) == (None, "loss")
    assert goal(budget={"bytes": 0.5}, max_loss=2.0).max_loss == 2.0
    assert goal("vllm", models="language models").prefer == "bytes"


def test_what_keeps_the_goal_comes_first_then_the_fastest_or_the_most_accurate() -> None:
    fast, exact = step("fast", loss=0.4, latency=0.3), step("exact", loss=0.1, latency=0.6)
    losing = step("losing", loss=3.0, latency=0.1, verdict="too much loss")
    failed = LadderStep("failed", "rung", "why", "failed", 1.0, "failed")
    ranked = sorted([failed, losing, exact, fast], key=lambda one: rank(goal(), one))
    assert [one.name for one in ranked] == ["fast", "exact", "losing", "failed"]
    within = goal(budget={"latency": 0.7})
    assert [one.name for one in sorted([fast, exact], key=lambda one: rank(within, one))] == ["exact", "fast"]


def test_the_nearest_to_a_budget_is_the_one_that_exceeds_it_least() -> None:
    wanted = goal(budget={"bytes": 0.1})
    near, far = (
        step(name, loss=None, size=size, verdict="over budget") for name, size in (("near", 0.11), ("far", 0.3))
    )
    assert rank(wanted, near) < rank(wanted, far)
    assert math.isclose(used(wanted, near.cost)["bytes"], 1.1)  # type: ignore[arg-type]
    assert math.isclose(used(goal(budget={"bytes": 220_000.0}), near.cost)["bytes"], 0.5)  # type: ignore[arg-type]


def test_the_pareto_front_has_only_steps_that_no_other_beats() -> None:
    steps = (step("a", loss=1.0, latency=0.2), step("b", loss=0.5, latency=0.4), step("c", loss=0.6, latency=0.5))
    assert pareto(goal(), steps) == ("a", "b")
