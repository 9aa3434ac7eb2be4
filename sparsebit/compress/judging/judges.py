"""Judges a candidate against the float model: paired differences on the same samples, with a confidence bound.

There is one judge per form of metric (`judge_of`): one score per sample, one number for all samples, or the user's own
evaluation. `SampleJudge` adds samples until the bound lies on one side of the allowed loss, so a bad candidate costs
few of them; the confidence is shared between the looks (Bonferroni).

Invariant: `select`, which is called for every candidate, and `conclude`, which is called for the chosen ones, never see
the same samples, because the choice among candidates makes the selection's scores too good.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from sparsebit.compress.judging.metrics import Metric, OfModel, PerSample, WholeSet, as_scores, inputs_of
from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.graph.values.nested import map_nested, tensors_of
from sparsebit.numerics.intervals import difference_margin, mean_margin
from sparsebit.progress import track
from sparsebit.records.ladder import Judgement

Model = Callable[..., Any]
FIRST_LOOK = 64  # samples; every further look has twice as many
_CONFIDENCE = 0.95
_GROUPS = 10  # of batches, left out one at a time (jackknife)
_CACHED_BYTES = 256 << 20  # of float outputs


class Judge(Protocol):
    """`select` stops as soon as the verdict is certain; `conclude` uses samples that `select` never saw.

    `check` scores the float model, so that a fault of the metric is raised before the first candidate is made. A metric
    may write into what it gets: outputs and batches are copies.
    """

    def check(self) -> None: ...

    def select(self, model: Model, allowed: float | None, rejects_above: float | None = None) -> Judgement: ...

    def conclude(self, model: Model, allowed: float | None) -> Judgement: ...


def judge_of(metric: Metric, float_model: Any, selection: Sequence[Any], final: Sequence[Any]) -> Judge:
    """The judge for this form of metric. `selection`, `final`: batches for a metric that has no data of its own."""
    if isinstance(metric, OfModel):
        return ModelJudge(metric, float_model)
    if isinstance(metric, WholeSet):
        return SetJudge(metric, float_model, selection, final)
    return SampleJudge(metric, float_model, selection, final)


@dataclass
class SampleJudge:
    """Judges by a metric with one score per sample."""

    metric: PerSample
    float_model: Any
    selection: Sequence[Any]
    final: Sequence[Any]
    # By `id`: the judge holds the batches, so no other object gets the id of one.
    _known: dict[int, Any] = field(default_factory=dict)  # float scores, or small float outputs, by batch
    _cached: int = 0

    def check(self) -> None:
        """An error if the scores of the first batch are not finite, or one mean for all its samples."""
        batch = self.selection[0]
        outputs = _run(self.float_model, batch, self.float_model)
        rows, has_rows = _rows(batch), any(_rows(one) == _rows(batch) for one in tensors_of(outputs))
        scores = self.metric.scores(outputs, _copied(batch), _copied(outputs))
        if len(scores) == 1 < rows and has_rows:
            raise ConfigError(
                f"metric={self.metric.name}: it returned one score for a batch of {rows} samples; return one for each"
            )
        paired(self.metric.name, self.metric.unit, scores, scores, None, _CONFIDENCE)

    def select(self, model: Model, allowed: float | None, rejects_above: float | None = None) -> Judgement:
        """`rejects_above`: a candidate that certainly loses more is given up, even if no loss limits it."""
        limit, looks = allowed if allowed is not None else rejects_above, self._num_looks()
        confidence, next_look = 1 - (1 - _CONFIDENCE) / looks, FIRST_LOOK
        scores: list[tuple[Tensor, Tensor]] = []
        for pair in self._pairs(model, self.selection):
            scores.append(pair)
            count = sum(len(float_scores) for float_scores, _ in scores)
            if count < next_look or limit is None:
                continue
            next_look *= 2
            found = self._judgement(scores, limit, confidence)
            assert found.bound is not None
            # Without an allowed loss, a candidate is only given up if it certainly loses more than the best one.
            if found.loss - found.bound > limit or (allowed is not None and found.is_decided):
                return found
        return self._judgement(scores, limit, confidence)

    def conclude(self, model: Model, allowed: float | None) -> Judgement:
        return self._judgement(list(self._pairs(model, self.final)), allowed, _CONFIDENCE)

    def _num_looks(self) -> int:
        total = sum(_rows(batch) for batch in self.selection)
        return max(1, math.ceil(math.log2(max(2.0, total / FIRST_LOOK))) + 1)

    def _pairs(self, model: Model, batches: Sequence[Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """The scores of the float model and of the candidate, batch by batch."""
        for batch in track(batches, "judging"):
            reference = self._reference(batch)
            scores = self.metric.scores(_run(model, batch, self.float_model), _copied(batch), reference)
            compares = self.metric.needs_reference
            float_scores = self.metric.scores(reference, _copied(batch), reference) if compares else reference
            if len(scores) != len(float_scores):
                raise CalibrationError(f"{self.metric.name}: {len(scores)} scores, and {len(float_scores)} of float")
            yield float_scores, scores

    def _reference(self, batch: Any) -> Any:
        """The float model's outputs if the metric compares with them, else its scores."""
        known = self._known.get(id(batch))
        if known is not None:
            return known
        outputs = _run(self.float_model, batch, self.float_model)
        found = outputs if self.metric.needs_reference else self.metric.scores(outputs, _copied(batch), None)
        size = _num_bytes(found)
        if self._cached + size <= _CACHED_BYTES:
            self._known[id(batch)] = found
            self._cached += size
        return found

    def _judgement(self, scores: list[tuple[Tensor, Tensor]], limit: float | None, confidence: float) -> Judgement:
        theirs, ours = (torch.cat(parts) for parts in zip(*scores, strict=True))
        return paired(self.metric.name, self.metric.unit, theirs, ours, limit, confidence)


@dataclass
class ModelJudge:
    """Judges by the user's `evaluate(model)`, which has data of its own.

    If it returns one score per sample, selection reads those at even places and the final judgement the others. If it
    returns one number, both use the same samples, and there is no bound.
    """

    metric: OfModel
    float_model: Any
    _float: Any = None

    def check(self) -> None:
        # A copy, because an evaluation may leave the model in train mode, in another type or on another device.
        self._float = self._score(copy.deepcopy(self.float_model))

    def select(self, model: Model, allowed: float | None, rejects_above: float | None = None) -> Judgement:
        return self._judged(model, allowed, slice(0, None, 2))

    def conclude(self, model: Model, allowed: float | None) -> Judgement:
        return self._judged(model, allowed, slice(1, None, 2))

    def _judged(self, model: Model, allowed: float | None, part: slice) -> Judgement:
        if self._float is None:
            self.check()
        ours = self._score(model)
        if isinstance(ours, Tensor) and isinstance(self._float, Tensor):
            if len(ours) != len(self._float):
                raise CalibrationError(f"{self.metric.name}: {len(ours)} scores, and {len(self._float)} of float")
            return paired(self.metric.name, self.metric.unit, self._float[part], ours[part], allowed, _CONFIDENCE)
        loss = self._float - ours
        return Judgement(self.metric.name, self.metric.unit, 0, self._float, ours, loss, None, is_decided=True)

    def _score(self, model: Model) -> Any:
        with torch.no_grad():
            value = self.metric.function(model)
        scores = as_scores(value, self.metric.name)
        return _finite(float(value), self.metric.name) if scores is None else scores


@dataclass
class SetJudge:
    """Judges by a metric of all samples together; the bound is a jackknife over groups of batches."""

    metric: WholeSet
    float_model: Any
    selection: Sequence[Any]
    final: Sequence[Any]
    _float: dict[int, list[Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.metric.name or getattr(self.metric.function, "__name__", "metric")

    def check(self) -> None:
        _finite(self._scored(self._float_outputs(self.selection), list(self.selection)), self.name)

    def select(self, model: Model, allowed: float | None, rejects_above: float | None = None) -> Judgement:
        return self._judged(model, self.selection, allowed)

    def conclude(self, model: Model, allowed: float | None) -> Judgement:
        return self._judged(model, self.final, allowed)

    def _judged(self, model: Model, batches: Sequence[Any], allowed: float | None) -> Judgement:
        theirs = self._float_outputs(batches)
        ours = [_run(model, batch, self.float_model) for batch in track(batches, "judging")]

        def scores(places: Sequence[int]) -> tuple[float, float]:
            chosen = [batches[place] for place in places]
            one, other = (self._scored([found[place] for place in places], chosen) for found in (theirs, ours))
            return one, other

        float_score, score = (_finite(one, self.name) for one in scores(range(len(batches))))
        loss, bound = float_score - score, None
        groups = min(_GROUPS, len(batches))
        if groups > 1:
            without = [
                scores([place for place in range(len(batches)) if place % groups != left]) for left in range(groups)
            ]
            losses = torch.tensor([one - other for one, other in without], dtype=torch.float64)
            # Jackknife: the spread of the loss without one group, scaled up to that of single groups.
            margin = mean_margin(losses) * (groups - 1)
            bound = margin if math.isfinite(margin) else None  # a metric may be undefined without some samples
        rows = sum(_rows(batch) for batch in batches)
        decided = _is_decided(loss, bound, allowed)
        return Judgement(self.name, self.metric.unit, rows, float_score, score, loss, bound, decided)

    def _float_outputs(self, batches: Sequence[Any]) -> list[Any]:
        if id(batches) not in self._float:
            self._float[id(batches)] = [_run(self.float_model, batch, self.float_model) for batch in batches]
        return self._float[id(batches)]

    def _scored(self, outputs: list[Any], batches: list[Any]) -> float:
        value = self.metric.function(_copied(outputs), _copied(batches))
        if as_scores(value, self.name) is not None:
            raise ConfigError(f"metric={self.name}: it returned {type(value).__name__}; return one number")
        return float(value)


def paired(name: str, unit: str, theirs: Tensor, ours: Tensor, allowed: float | None, confidence: float) -> Judgement:
    """The judgement from one score per sample of the float model and of the candidate."""
    is_share, count = theirs.dtype == torch.bool, len(theirs)
    if not count:
        raise CalibrationError(f"{name}: no samples to judge by")
    scale = 100.0 if is_share else 1.0
    float_score, score = (scale * float(part.double().mean()) for part in (theirs, ours))
    if is_share:
        lost, gained = int((theirs & ~ours).sum()), int((ours & ~theirs).sum())
        bound = scale * difference_margin(lost, gained, count, confidence)
    else:
        bound = mean_margin(theirs.double() - ours.double(), confidence)
    loss = float_score - score
    if not math.isfinite(loss):
        raise CalibrationError(f"{name}: the scores are not finite ({float_score}, {score})")
    return Judgement(name, unit, count, float_score, score, loss, bound, _is_decided(loss, bound, allowed))


def _finite(value: float, name: str) -> float:
    if not math.isfinite(value):
        raise ConfigError(f"metric={name}: it returned {value}; return a finite number")
    return value


def _is_decided(loss: float, bound: float | None, allowed: float | None) -> bool:
    return allowed is None or bound is None or abs(loss - allowed) >= bound


@torch.no_grad()
def _run(model: Model, batch: Any, float_model: Any) -> Any:
    """The outputs of a batch. The model gets a copy, because it may write into its inputs."""
    args, kwargs = _copied(inputs_of(batch, float_model))
    return model(*args, **kwargs)


def _copied(value: Any) -> Any:
    return map_nested(Tensor, torch.clone, value)


def _rows(batch: Any) -> int:
    return next((len(tensor) for tensor in tensors_of(batch) if tensor.dim()), 1)


def _num_bytes(value: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(value))
