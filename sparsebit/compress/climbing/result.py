"""`Result`: what a search found, for networks and for language models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsebit.records.ladder import Ladder, LadderStep
from sparsebit.report.notebook import fragment
from sparsebit.report.read_ladder import run_of_ladder


@dataclass(frozen=True)
class Result:
    """The result of a search. `ladder` has all facts; `folder` has the files.

    `best`: where the best file is, if there is one. `load`: the model that it was written from.
    """

    ladder: Ladder
    folder: Path
    best: Path
    load: Callable[[LadderStep], Any]

    @property
    def file(self) -> Path | None:
        """The best file (of a language model, it may be a folder); None if no candidate could be made."""
        return self.best if self.ladder.best else None

    @property
    def model(self) -> Any:
        """The quantized model that the file was written from; None if there is none."""
        if not self.ladder.best:
            return None
        return self.load(self.ladder.step(self.ladder.best))

    @property
    def met(self) -> bool:
        """Whether the file keeps the goal."""
        return self.ladder.met

    @property
    def reason(self) -> str:
        """Why, in a sentence, with the loss and the cost."""
        return self.ladder.reason

    @property
    def steps(self) -> tuple[LadderStep, ...]:
        """Everything that was tried, in order."""
        return self.ladder.steps

    @property
    def pareto(self) -> tuple[LadderStep, ...]:
        """The steps that no other one beats in both loss and cost, the cheapest first."""
        return tuple(self.ladder.step(name) for name in self.ladder.pareto)

    def _repr_html_(self) -> str:
        """The last line of a notebook's cell: the numbers and the ladder."""
        return fragment(run_of_ladder(self.ladder, self.folder.name))

    def __str__(self) -> str:
        return f"{'met' if self.met else 'not met'}: {self.reason}"
