"""`Search`: asks the rungs for candidates until none has a new one or the time is used up, then chooses the best.

The only state is the ladder, which is written after every step. A rung's proposal depends on the ladder and the
calibration data alone, so a killed search continues as if it had not stopped. 5 % of the time is kept for the end:
the fastest candidates are timed again in turns, and the best are judged on samples that the selection never saw.

Invariant: one candidate or rung that raises must not end the search; it becomes a failed step or a log line.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from sparsebit.compress.climbing.conclusion import ENDS_AT, reason_for
from sparsebit.compress.climbing.goal import cost_of, pareto, rank
from sparsebit.compress.climbing.known import AnyStudy, Candidate, Known
from sparsebit.compress.climbing.run_folder import RunFolder
from sparsebit.compress.climbing.rung import Rung
from sparsebit.deploy.audit.file_latency import Timed
from sparsebit.deploy.sessions.environment import environment
from sparsebit.errors import BudgetError
from sparsebit.progress import OutOfTime, time_limit
from sparsebit.records.ladder import Cost, Judgement, Ladder, LadderGoal, LadderStep

log = logging.getLogger(__name__)

Show = Callable[[Ladder], None]
# At most so many candidates are judged on the final samples: each choice among them makes these samples less unseen.
_MOST_FINALS = 3
_NEAR = 1.15  # candidates this near to the fastest are timed again, in turns
_EQUAL = 1.03  # candidates within 3 % of the fastest count as equally fast; the smallest of them is chosen


class Trials(Protocol):
    """The part of a search that depends on the kind of model: `networks/trial.py`, `language/trial.py`."""

    def made(self, recipe: Any, step: LadderStep, folder: Path, rejects_above: float | None) -> LadderStep:
        """The candidate, its files in `folder`, measured and judged."""

    def concluded(self, step: LadderStep, folder: Path) -> Judgement:
        """The judgement on samples that selection never saw."""

    def times(self, folders: Mapping[str, Path]) -> Mapping[str, Timed]:
        """The time of each candidate over the float file's, in turns; empty if time is not measured."""


class Search:
    """`ladder`: empty, or of a search that was stopped. `show` is called after every step."""

    def __init__(
        self, trials: Trials, study: AnyStudy, rungs: Sequence[Rung], folder: RunFolder, ladder: Ladder, show: Show
    ) -> None:
        self.trials, self.study, self.rungs = trials, study, rungs
        self.folder, self.ladder, self.show = folder, ladder, show
        self.began = time.monotonic() - ladder.seconds
        self.given_up: set[str] = set()  # rungs that raised: they would raise again

    @property
    def seconds(self) -> float:
        """Since the search began, without the time that it was stopped."""
        return time.monotonic() - self.began

    @property
    def seconds_left(self) -> float:
        """The time left for candidates, without the reserve for the final judgement."""
        return 60 * self.ladder.goal.minutes * ENDS_AT - self.seconds

    def run(self) -> Ladder:
        """The finished ladder; of an interrupted search, the best so far.

        In the folder it is not finished yet: the caller writes that after the best candidate's files, so that a call
        which was killed before continues.
        """
        finished = True
        try:
            self._climb()
        except KeyboardInterrupt:
            log.warning("interrupted: the best candidate so far is kept; repeat the call to continue")
            finished = False
        return self._concluded(finished=finished)

    def _climb(self) -> None:
        while self._climbed_once():
            pass

    def _climbed_once(self) -> bool:
        """Ask every rung in order until it has nothing new; whether any candidate was tried and time is left."""
        has_tried = False
        for rung in self.rungs:
            while rung.name not in self.given_up and self._has_time():
                try:
                    with time_limit(self.seconds_left):
                        candidate = rung.propose(self._known())
                        if candidate is None or self._is_tried(candidate):
                            break
                        self._try(rung, candidate)
                        has_tried = True
                except OutOfTime:
                    log.info("the time ran out in the rung %s", rung.name)
                    return False
                except Exception as fault:  # a rung may measure something that this model does not allow
                    level = logging.INFO if isinstance(fault, BudgetError) else logging.WARNING
                    log.log(level, "rung %s proposes nothing: %s: %s", rung.name, type(fault).__name__, fault)
                    self.given_up.add(rung.name)
        return has_tried and self._has_time()

    def _has_time(self) -> bool:
        """Whether there is time for one more candidate that takes as long as the quickest so far."""
        quickest = min((step.seconds for step in self.ladder.steps if step.cost is not None), default=0.0)
        return self.seconds_left > quickest

    def _known(self) -> Known:
        return Known(self.ladder.goal, self.ladder.steps, self.study, self.seconds_left)

    def _is_tried(self, candidate: Candidate) -> bool:
        known, key = self._known(), candidate.recipe.key
        return any(step.recipe and known.recipe(step).key == key for step in self.ladder.steps)

    def _try(self, rung: Rung, candidate: Candidate) -> None:
        name = f"{len(self.ladder.steps) + 1:02d}-{candidate.name}"
        folder = self.folder.step_folder(name)
        recipe = candidate.recipe.to_dict()
        step = LadderStep(
            name, rung.name, candidate.why, "out of time", 0.0, self.folder.relative(folder), recipe=recipe
        )
        best = self._known().kept
        rejects = best.selection.loss if best is not None and best.selection is not None else None
        log.info("%s: %s", name, candidate.why)
        # If the least loss is wanted, a candidate that certainly loses more than the best one is not judged to the end.
        limit = rejects if self.ladder.goal.prefer == "loss" else None
        began = time.monotonic()
        try:
            tried = self.trials.made(candidate.recipe, step, folder, limit)
        except OutOfTime:
            self._add(replace(step, seconds=time.monotonic() - began))
            raise
        except Exception as fault:  # a candidate that cannot be made is a result; the search goes on
            log.info("%s failed", name, exc_info=True)
            tried = replace(step, verdict="failed", fault=f"{type(fault).__name__}: {fault}")
        self._add(replace(tried, seconds=time.monotonic() - began))

    def _add(self, step: LadderStep) -> None:
        steps = (*self.ladder.steps, step)
        judged = [one for one in steps if one.cost is not None]
        best = min(judged, key=lambda one: rank(self.ladder.goal, one), default=None)
        changes = {"steps": steps, "best": "" if best is None else best.name, "seconds": self.seconds}
        self._write(self.ladder.replace(**changes, pareto=pareto(self.ladder.goal, steps)))
        log.info("%s: %s, %s", step.name, step.verdict, step.fault or step.selection or "not judged")

    def _write(self, ladder: Ladder) -> None:
        self.ladder = ladder
        self.folder.write(ladder)
        self.show(ladder)

    def _concluded(self, *, finished: bool) -> Ladder:
        """Choose among those that keep the goal: time the fastest again, judge on samples that selection never saw."""
        goal = self.ladder.goal
        self._time_again()
        ranked = self._ranked()
        chosen, met = (ranked[0] if ranked else None), False
        for step in [step for step in ranked if step.verdict == "within"][:_MOST_FINALS]:
            judged = self._finally_judged(step)
            final = judged.final
            assert final is not None
            met = goal.max_loss is None or final.loss <= goal.max_loss + (final.bound or 0.0)
            if met:
                chosen = judged
                break
            log.warning("%s: %s, on samples that the selection never saw", step.name, final)
        if not met and chosen is not None and chosen.selection is not None and chosen.final is None:
            chosen = self._finally_judged(chosen)
        best = "" if chosen is None else chosen.name
        ladder = self.ladder.replace(best=best, met=met, seconds=self.seconds, finished=finished)
        ladder = ladder.replace(reason=reason_for(ladder))
        self._write(ladder.replace(finished=False))
        return ladder

    def _ranked(self) -> list[LadderStep]:
        """The judged steps, the best first. Steps that are equally fast up to noise are ordered by size."""
        goal = self.ladder.goal
        ranked = sorted((step for step in self.ladder.steps if step.cost is not None), key=lambda s: rank(goal, s))
        if goal.prefer != "latency" or not ranked or ranked[0].verdict != "within":
            return ranked
        limit = _EQUAL * cost_of(goal, _cost(ranked[0]))
        equal = [step for step in ranked if step.verdict == "within" and cost_of(goal, _cost(step)) <= limit]
        equal.sort(key=lambda step: _cost(step).num_bytes)  # a stable sort: among equal sizes, the faster one is first
        return [*equal, *(step for step in ranked if step not in equal)]

    def _time_again(self) -> None:
        """Time the fastest candidates again, in turns: times that were measured minutes apart differ by noise."""
        if self.ladder.goal.prefer != "latency":
            return
        kept = [step for step in self.ladder.steps if step.verdict == "within" and step.cost and step.cost.latency]
        fastest = min((step.cost.latency for step in kept if step.cost and step.cost.latency), default=0.0)
        near = [step for step in kept if step.cost and (step.cost.latency or 0) <= _NEAR * fastest]
        if len(near) < 2:
            return
        folders = {step.name: self.folder.path / step.folder for step in near}
        for name, timed in self.trials.times(folders).items():
            if name in folders:
                step = self.ladder.step(name)
                assert step.cost is not None
                self._replace(replace(step, cost=replace(step.cost, latency=timed.ratio, milliseconds=timed.ms)))

    def _finally_judged(self, step: LadderStep) -> LadderStep:
        if step.final is not None:
            return step
        found = replace(step, final=self.trials.concluded(step, self.folder.path / step.folder))
        self._replace(found)
        return found

    def _replace(self, step: LadderStep) -> None:
        steps = tuple(step if one.name == step.name else one for one in self.ladder.steps)
        self._write(self.ladder.replace(steps=steps))


def _cost(step: LadderStep) -> Cost:
    assert step.cost is not None
    return step.cost


def empty_ladder(identity: str, goal: LadderGoal) -> Ladder:
    """The ladder at the beginning of a search."""
    return Ladder(
        identity=identity,
        goal=goal,
        float_cost=None,
        steps=(),
        best="",
        met=False,
        reason="",
        pareto=(),
        seconds=0.0,
        finished=False,
        reproduce="",
        environment=environment(),
    )
