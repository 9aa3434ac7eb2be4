"""The search itself, with candidates that cost nothing: order, time, interrupts, resuming, and the conclusion."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparsebit.compress.climbing.goal import read_goal
from sparsebit.compress.climbing.known import Candidate, Known
from sparsebit.compress.climbing.run_folder import RunFolder
from sparsebit.compress.climbing.rung import Rung
from sparsebit.compress.climbing.search import Search
from sparsebit.compress.networks.recipe import Recipe
from sparsebit.errors import BudgetError
from sparsebit.progress import track
from sparsebit.quantization import parse_qconfig
from sparsebit.records.ladder import Cost, Judgement, Ladder, LadderStep
from tests.records.made_ladders import ENVIRONMENT

RECIPE = Recipe(parse_qconfig("virtual"))


def judged(loss: float, bound: float = 0.1) -> Judgement:
    return Judgement("m", "points", 100, 90.0, 90.0 - loss, loss, bound, is_decided=True)


def ladder(**goal: Any) -> Ladder:
    given = {"max_loss": None, "budget": None, "prefer": None, "minutes": 1.0, **goal}
    return Ladder(
        "id", read_goal("onnxruntime", "m", **given), None, (), "", False, "", (), 0.0, False, "", ENVIRONMENT
    )


def rung(name: str, *bits: int, order: int = 10, propose: Callable[[Known], Any] | None = None) -> Rung:
    """Proposes candidates with these bits, one after the other."""

    def next_one(known: Known) -> Candidate | None:
        left = bits[len(known.of(name)) :]
        return (
            Candidate(f"{name}{left[0]}", "why", Recipe(RECIPE.config.replace("W.QUANTIZER.BIT", left[0])))
            if left
            else None
        )

    return Rung(name, order, propose or next_one)


class Trials:
    """Candidates that cost nothing: `outcomes` by name are (loss, latency[, bytes]), or what to raise."""

    def __init__(self, **outcomes: Any) -> None:
        self.outcomes, self.tried, self.finals = outcomes, list[str](), dict[str, float]()
        self.limit: float | None = None

    def made(self, recipe: Any, step: LadderStep, folder: Path, rejects_above: float | None) -> LadderStep:
        name = step.name.split("-", 1)[1]
        self.tried.append(name)
        found = self.outcomes[name]
        if callable(found):
            found = found()
        if isinstance(found, BaseException):
            raise found
        loss, latency, *size = found
        limit = self.limit
        verdict: Any = "within" if limit is None or loss <= limit else "too much loss"
        cost = Cost(size[0] if size else 100, 0.3, 10, 1.0, 2 * latency, latency)
        return replace(step, verdict=verdict, seconds=0.01, cost=cost, selection=judged(loss))

    def concluded(self, step: LadderStep, folder: Path) -> Judgement:
        return judged(self.finals.get(step.name, 0.0))

    def times(self, folders: Any) -> dict[str, Any]:
        return {}


class Study:
    def recipe(self, values: dict[str, Any]) -> Recipe:
        return Recipe.from_dict(values)


@pytest.fixture
def climb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ladder]:
    def run(
        trials: Trials, *rungs: Rung, begin: Ladder | None = None, final: Any = None, show: Any = lambda _: None
    ) -> Ladder:
        begin = begin or ladder()
        trials.finals, trials.limit = final or {}, begin.goal.max_loss
        folder = RunFolder(tmp_path / "run")
        with folder.alone():
            return Search(
                trials, Study(), rungs, folder, folder.read("id", begin.goal.minutes, "best.onnx") or begin, show
            ).run()

    return run


def test_of_files_that_are_as_fast_the_smallest_is_chosen(climb: Any) -> None:
    rungs, small = rung("a", 8, 4, 2), (0.2, 0.51, 40)
    assert climb(Trials(a8=(0.1, 0.5, 100), a4=small, a2=(0.0, 0.6, 10)), rungs).best == "02-a4"


def test_a_smaller_file_that_is_slower_is_not_chosen(climb: Any) -> None:
    assert climb(Trials(a8=(0.1, 0.5, 100), a4=(0.2, 0.53, 40)), rung("a", 8, 4)).best == "01-a8"


def test_of_files_that_are_as_fast_those_that_lose_too_much_stay_behind(climb: Any) -> None:
    trials = Trials(a8=(0.1, 0.5, 100), a4=(2.0, 0.5, 40))
    assert climb(trials, rung("a", 8, 4), begin=ladder(max_loss=1.0)).best == "01-a8"


def test_rungs_are_climbed_in_order_until_nothing_is_new(climb: Any) -> None:
    trials = Trials(a8=(0.1, 0.5), a4=(3.0, 0.2), b6=(0.4, 0.4))
    found = climb(trials, rung("a", 8, 4), rung("b", 6))
    assert trials.tried == ["a8", "a4", "b6"]
    assert [step.name for step in found.steps] == ["01-a8", "02-a4", "03-b6"]
    assert found.best == "03-b6" and found.met and found.finished
    assert found.pareto == ("02-a4", "03-b6", "01-a8")


def test_a_recipe_is_tried_once(climb: Any) -> None:
    trials = Trials(a8=(0.1, 0.5), b8=(0.1, 0.5))
    assert len(climb(trials, rung("a", 8), rung("b", 8)).steps) == 1


def test_a_rung_that_fails_is_left_and_the_others_go_on(climb: Any) -> None:
    def broken(known: Known) -> Candidate:
        raise BudgetError("no choice keeps it")

    found = climb(Trials(a8=(0.1, 0.5)), rung("broken", propose=broken), rung("a", 8))
    assert found.best == "01-a8" and found.finished


def test_the_time_ends_the_search_and_the_best_so_far_is_the_answer(climb: Any) -> None:
    def slow() -> tuple[float, float]:
        for _ in track(range(1000), "working"):
            time.sleep(0.01)
        raise AssertionError("the time limit did not end the loop")

    trials = Trials(a8=(0.1, 0.5), a4=slow)
    began = time.monotonic()
    found = climb(trials, rung("a", 8, 4, 2), begin=ladder(minutes=1 / 60))
    assert time.monotonic() - began < 3
    assert trials.tried == ["a8", "a4"]
    assert found.step("02-a4").verdict == "out of time" and found.best == "01-a8" and found.met and found.finished


def test_an_interrupt_gives_the_best_so_far_and_the_same_call_goes_on(climb: Any) -> None:
    first = climb(Trials(a8=(0.1, 0.5), a6=KeyboardInterrupt()), rung("a", 8, 6))
    assert first.best == "01-a8" and first.met and not first.finished
    trials = Trials(a6=(0.2, 0.3))
    second = climb(trials, rung("a", 8, 6))
    assert trials.tried == ["a6"]  # the first candidate is not tried again
    assert second.best == "02-a6" and second.finished


class Killed(BaseException):
    """Ends a call as SIGKILL does: nothing of the search handles it."""


@pytest.mark.parametrize("place", [1, 2, 3])
@pytest.mark.parametrize("moment", ["before the ladder is written", "after"])
def test_a_search_killed_at_any_step_ends_as_one_that_was_not(climb: Any, place: int, moment: str) -> None:
    outcomes = {"a8": (0.1, 0.5), "a4": (3.0, 0.2), "b6": (0.4, 0.4)}
    rungs = rung("a", 8, 4), rung("b", 6)

    class KilledTrials(Trials):
        def made(self, recipe: Any, step: LadderStep, folder: Path, rejects_above: float | None) -> LadderStep:
            made = super().made(recipe, step, folder, rejects_above)
            (folder / "model.onnx").write_text(step.name)
            if moment != "after" and len(self.tried) == place:
                raise Killed
            return made

    def killed(ladder: Ladder) -> None:
        if moment == "after" and len(ladder.steps) == place:
            raise Killed

    with pytest.raises(Killed):
        climb(KilledTrials(**outcomes), *rungs, show=killed)
    trials = Trials(**outcomes)
    found = climb(trials, *rungs)
    assert trials.tried == ["a8", "a4", "b6"][place - (moment != "after") :]
    assert [step.name for step in found.steps] == ["01-a8", "02-a4", "03-b6"]
    assert (found.best, found.met, found.finished) == ("03-b6", True, True)
    assert found.pareto == ("02-a4", "03-b6", "01-a8")


def test_the_folder_says_finished_only_after_the_results_are_written(climb: Any, tmp_path: Path) -> None:
    found = climb(Trials(a8=(0.1, 0.5)), rung("a", 8))
    kept = RunFolder(tmp_path / "run").read("id", 1.0, "best.onnx")
    assert found.finished and kept is not None and kept == found.replace(finished=False)
    again = Trials()
    assert climb(again, rung("a", 8)).replace(seconds=found.seconds) == found and not again.tried


def test_more_minutes_go_on_and_try_again_what_the_time_ended(climb: Any) -> None:
    def slow() -> tuple[float, float]:
        for _ in track(range(1000), "working"):
            time.sleep(0.01)
        raise AssertionError("the time limit did not end the loop")

    first = climb(Trials(a8=(0.1, 0.5), a4=slow), rung("a", 8, 4), begin=ladder(minutes=1 / 60))
    assert [step.verdict for step in first.steps] == ["within", "out of time"]
    trials = Trials(a4=(0.2, 0.3))
    found = climb(trials, rung("a", 8, 4), begin=ladder(minutes=1.0))
    assert trials.tried == ["a4"] and found.best == "02-a4" and found.goal.minutes == 1.0


def test_the_time_of_a_stopped_search_counts(climb: Any) -> None:
    begun = ladder(minutes=1.0).replace(seconds=58.0)
    trials = Trials(a8=(0.1, 0.5))
    assert not climb(trials, rung("a", 8), begin=begun).steps and not trials.tried  # 57 s are for candidates


def test_nothing_within_the_loss_gives_the_nearest_with_the_reason(climb: Any) -> None:
    found = climb(Trials(a8=(2.0, 0.5), a4=(5.0, 0.3)), rung("a", 8, 4))
    assert not found.met and found.best == "01-a8"
    assert "2 of 2 candidates lose more than 1 ± 0.1 points" in found.reason and "train.py" in found.reason


def test_a_candidate_that_loses_on_unseen_samples_makes_way_for_the_next(climb: Any) -> None:
    found = climb(Trials(a8=(0.1, 0.5), a4=(0.2, 0.3)), rung("a", 8, 4), final={"02-a4": 4.0})
    assert found.best == "01-a8" and found.met
    assert found.step("02-a4").final.loss == 4.0


def test_if_all_lose_on_unseen_samples_the_goal_is_not_met(climb: Any) -> None:
    found = climb(Trials(a8=(0.1, 0.5)), rung("a", 8), final={"01-a8": 3.0})
    assert not found.met and "on unseen samples" in found.reason


def test_no_candidate_at_all(climb: Any) -> None:
    found = climb(Trials(), rung("a"))
    assert found.best == "" and not found.met and "no candidate was made" in found.reason
