"""Values of a search, made by hand: judgements, costs, steps and goals."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sparsebit.compress.climbing.goal import read_goal
from sparsebit.compress.networks.recipe import Recipe
from sparsebit.records.ladder import Cost, Judgement, Ladder, LadderGoal, LadderStep
from tests.records.made_ladders import ENVIRONMENT

FLOAT = Cost(1_000_000, 1.0, 10_000, 1.0, 2.0, 1.0)


def judged(loss: float, bound: float | None = 0.1, count: int = 100) -> Judgement:
    return Judgement("m", "points", count, 90.0, 90.0 - loss, loss, bound, is_decided=True)


def goal(target: str = "onnxruntime", **given: Any) -> LadderGoal:
    return read_goal(target, "m", **{"max_loss": None, "budget": None, "prefer": None, "minutes": 20.0, **given})


def step(
    name: str,
    rung: str = "eight bits",
    recipe: Recipe | None = None,
    *,
    loss: float | None = 0.5,
    size: float = 0.3,
    latency: float = 0.5,
    macs: float = 1.0,
    **more: Any,
) -> LadderStep:
    """A step that was made; `loss` None: not judged. `size`, `latency`, `macs`: shares of `FLOAT`."""
    cost = Cost(round(1e6 * size), size, round(1e4 * macs), macs, 2 * latency, latency)
    values = {} if recipe is None else recipe.to_dict()
    selection = None if loss is None else judged(loss)
    given = {"verdict": "within", "seconds": 1.0, "cost": cost, "selection": selection, **more}
    return LadderStep(name, rung, "why", folder=f"candidates/{name}", recipe=values, **given)


def ladder(wanted: LadderGoal, *steps: LadderStep, **more: Any) -> Ladder:
    """A finished ladder whose best step is the first."""
    given = {"best": steps[0].name if steps else "", "met": False, "finished": True, "float_cost": FLOAT, **more}
    empty: dict[str, Any] = {"reason": "", "pareto": (), "seconds": 1.0, "reproduce": "", "environment": ENVIRONMENT}
    return Ladder("id", wanted, steps=steps, **{**empty, **given})


@dataclass
class Study:
    """The answers of a study to the rungs; `asked`: the shares that they asked for, in order."""

    low_bit_config: Any = None
    worst: tuple[str, ...] = ()
    linears: bool = False
    depthwise: bool = False
    steps: int = 500
    low_bits: tuple[int, ...] = (4, 8)
    joint: Any = None
    float_cost: Cost = FLOAT
    asked: list[Any] = field(default_factory=list)

    def recipe(self, values: dict[str, Any]) -> Recipe:
        return Recipe.from_dict(values)

    @property
    def bench(self) -> Study:
        return self

    def has_linears(self) -> bool:
        return self.linears

    def has_depthwise(self) -> bool:
        return self.depthwise

    def worst_layers(self, one: LadderStep) -> list[str]:
        self.asked.append(one.name)
        return list(self.worst)

    def learning_steps(self, minutes: float) -> int:
        return self.steps

    def bits_under(self, config: Any, share: float, weight_bits: tuple[int, ...]) -> Any:
        self.asked.append(share)
        return config

    def channels_and_bits(self, config: Any, share: float, weight_bits: tuple[int, ...]) -> Any:
        self.asked.append(share)
        return self.joint

    def channels(self, budget: dict[str, float]) -> tuple[Any, int]:
        self.asked.append(budget)
        return "{SPARSER: {TYPE: structured, RATIO: 0.25}}", 8
