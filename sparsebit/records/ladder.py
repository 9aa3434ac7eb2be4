"""`Ladder`: the candidates that `sparsebit.compress` tried, how each was judged, and which one it chose.

Plain data for `ladder.json`, from which a stopped search continues: a new or renamed field needs a new `VERSION`.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, Literal

from sparsebit.errors import RecordError
from sparsebit.records.json_form import filled, to_plain
from sparsebit.records.run_record import Environment

FORMAT = "sparsebit-ladder"
VERSION = 1

Verdict = Literal["within", "too much loss", "over budget", "failed", "out of time"]


@dataclass(frozen=True)
class Judgement:
    """A candidate against the float model on the same samples.

    `loss`: the mean of the paired differences, float minus candidate, in the unit of the metric: positive is worse.
    `bound`: half the width of its 95 % confidence interval; None if the metric returns one number for all samples.
    `is_decided`: the interval lies on one side of the allowed loss.
    """

    metric: str
    unit: str
    num_samples: int
    float_score: float
    score: float
    loss: float
    bound: float | None
    is_decided: bool

    def __str__(self) -> str:
        bound = "" if self.bound is None else f" ± {self.bound:.2g}"
        samples = f" on {self.num_samples} samples" if self.num_samples else ""  # a metric may have data of its own
        verb, amount = ("gains", -self.loss) if self.loss <= -0.005 else ("loses", abs(self.loss))
        return f"{verb} {amount:.2f}{bound} {self.unit}{samples}"


@dataclass(frozen=True)
class Cost:
    """The cost of a file. `num_bytes`: on disk. `macs`: multiplications of one call; 0 if not counted.

    `milliseconds`: the time of a call, `latency`: that time over the float file's, measured in turns; None if the
    target does not run here. `bits`: of a weight of a language model, with its scales.
    """

    num_bytes: int
    bytes_ratio: float
    macs: int
    macs_ratio: float
    milliseconds: float | None = None
    latency: float | None = None
    bits: float | None = None


@dataclass(frozen=True)
class LadderStep:
    """One candidate. `rung`: the function that proposed it, `why`: for which reason. `folder`: relative to the run.

    `recipe`: how it is made, as the `to_dict` of its recipe returns it (of a network: `config`, `placement`, ...).
    `parity`: the verdict of the comparison of the file with the simulation. `fault`: why the candidate failed.
    """

    name: str
    rung: str
    why: str
    verdict: Verdict
    seconds: float
    folder: str
    recipe: dict[str, Any] = field(default_factory=dict)
    cost: Cost | None = None
    selection: Judgement | None = None
    final: Judgement | None = None
    parity: str = ""
    fault: str = ""


@dataclass(frozen=True)
class LadderGoal:
    """The user's goal. `max_loss`: None without a limit. `budget`: limits of `latency`, `bytes`, `macs` or `bits`.

    A limit up to 1 is a share of the float file's; a larger one is absolute (milliseconds, bytes, multiplications).
    `prefer`: what is made small within these limits; `loss` if a budget was given.
    """

    target: str
    metric: str
    max_loss: float | None
    budget: dict[str, float]
    prefer: Literal["latency", "bytes", "macs", "bits", "loss"]
    minutes: float


@dataclass(frozen=True)
class Ladder:
    """All steps in the order they were tried. `best`: the name of the chosen one; empty: none has been made.

    `pareto`: the names of the steps that no other step beats in both loss and cost. `float_cost`: of the float file.
    `finished`: False while the search runs, or after it was interrupted. `identity`: a checksum of the model, the data
    and the goal. `reproduce`: how to make the chosen file again without a search.
    """

    identity: str
    goal: LadderGoal
    float_cost: Cost | None
    steps: tuple[LadderStep, ...]
    best: str
    met: bool
    reason: str
    pareto: tuple[str, ...]
    seconds: float
    finished: bool
    reproduce: str
    environment: Environment
    version: int = field(default=VERSION, init=False)

    def step(self, name: str) -> LadderStep:
        return next(step for step in self.steps if step.name == name)

    def replace(self, **changes: Any) -> Ladder:
        return dataclasses.replace(self, **changes)

    def to_json(self) -> str:
        values = {"format": FORMAT, **to_plain(self, Ladder)}
        return json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "ladder") -> Ladder:
        """The inverse of `to_json`; a RecordError for anything else. `source`: its name in messages."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{source} is damaged: {str(error) or 'nested too deeply'}") from None
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise RecordError(f"{source} is not a ladder of `sparsebit compress`; name the folder of a run")
        if values.get("version") != VERSION:
            raise RecordError(f"{source} has version {values.get('version')!r}; this Sparsebit reads version {VERSION}")
        return filled(cls, values, "ladder", source)
