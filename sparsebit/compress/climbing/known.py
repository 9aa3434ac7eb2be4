"""`Known`: what a search knows when it asks a rung for the next candidate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from sparsebit.compress.climbing.goal import rank, used
from sparsebit.records.ladder import LadderGoal, LadderStep


class AnyRecipe(Protocol):
    """How a candidate is made, as plain values. `to_dict` is for records; equal recipes have equal keys."""

    @property
    def key(self) -> str: ...

    def to_dict(self) -> dict[str, Any]: ...


class AnyStudy(Protocol):
    """Measurements that rungs ask for. `recipe` rebuilds a recipe from the values in a step."""

    def recipe(self, values: dict[str, Any]) -> Any: ...


@dataclass(frozen=True)
class Candidate:
    """A recipe that a rung proposes. `name`: short and unique in a run; `why`: the reason, in a sentence."""

    name: str
    why: str
    recipe: AnyRecipe


@dataclass(frozen=True)
class Known:
    """The input of a rung. `steps`: everything that was tried, in order; `seconds_left`: until the search ends.

    `study`: an `AnyStudy`, of networks (`networks/study.py`) or of language models (`language/recipe.py`).
    """

    goal: LadderGoal
    steps: tuple[LadderStep, ...]
    study: Any
    seconds_left: float

    @property
    def best(self) -> LadderStep | None:
        """The best candidate so far that keeps the goal; if none does, the one nearest to it."""
        made = [step for step in self.steps if step.cost is not None]
        return min(made, key=lambda step: rank(self.goal, step), default=None)

    @property
    def kept(self) -> LadderStep | None:
        """The best candidate, if it keeps the goal."""
        best = self.best
        return best if best is not None and best.verdict == "within" else None

    @property
    def loses(self) -> bool:
        """Whether the best candidate should be more accurate: it loses too much, or the goal is the least loss."""
        best = self.best
        if best is None or best.selection is None:
            return False
        wants_less = self.goal.prefer == "loss" and best.selection.loss > 0
        return best.verdict == "too much loss" or (best.verdict == "within" and wants_less)

    def of(self, rung: str) -> list[LadderStep]:
        """The steps that a rung proposed."""
        return [step for step in self.steps if step.rung == rung]

    def first(self, rung: str) -> LadderStep | None:
        """The first step of a rung whose candidate was made."""
        return next((step for step in self.of(rung) if step.cost is not None), None)

    def recipe(self, step: LadderStep) -> Any:
        """The recipe of a step, whose fields a rung changes with `replace`."""
        return self.study.recipe(step.recipe)

    def over(self, name: str) -> float:
        """The share of a budget that the best candidate uses: above 1 is too much; 0 without that budget."""
        best = self.best
        return 0.0 if best is None or best.cost is None else used(self.goal, best.cost).get(name, 0.0)

    @property
    def wants_small(self) -> bool:
        """Whether the goal asks for a small file."""
        return self.goal.prefer == "bytes" or "bytes" in self.goal.budget
