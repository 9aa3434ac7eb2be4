"""`ScoreFacts`: the scores of several forms of one model on the same samples."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelScore:
    """The score of one form of the model. `difference`: from the first form; `margin`: half of its 95 % interval.

    Both are None for the first form, and where single samples are not known.
    """

    name: str
    score: float
    difference: float | None = None
    margin: float | None = None


@dataclass(frozen=True)
class ScoreFacts:
    """Higher scores are better. `unit`: `%`, or empty for a user's own metric. `data`: a description.

    `models`: the float or dense model first, the one that is used (the file, if it was scored) last. `num_samples`:
    None if the metric has its own data. `note`: a remark on the samples.
    """

    metric: str
    unit: str
    models: tuple[ModelScore, ...]
    num_samples: int | None = None
    data: str = ""
    note: str = ""
