"""Accuracy of the float model, the simulation and the file on the same labelled samples.

All models answer the same batches in one pass (`measure`), so that their differences are paired: the report says how
many answers changed, and whether a difference is within chance. Without labels, the answers of the first model take
their place (agreement). Labels below 0 (-100 and the like) do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.cli.inputs.data import Data
from sparsebit.cli.inputs.loading import LoadingError
from sparsebit.execution.batches import as_call, to_device
from sparsebit.numerics.intervals import difference_margin, share_interval
from sparsebit.quantization.inspecting.class_scores import parted, scores_in
from sparsebit.records.scores import ModelScore, ScoreFacts

Predictor = Callable[..., Any]


@dataclass(frozen=True)
class Answers:
    """How many samples one model classifies correctly, and how its answers differ from the first model's.

    `lost`: right for the first model and wrong for this; `gained`: the other way around.
    """

    name: str
    right: int
    changed: int = 0
    lost: int = 0
    gained: int = 0


@dataclass(frozen=True)
class Accuracy:
    """Top-1 accuracy of several models on the same samples. `data` describes them, `note` is a remark on them."""

    models: tuple[Answers, ...]
    num_samples: int
    data: str
    note: str = ""
    metric: str = "top-1 accuracy"

    def to_dict(self) -> dict[str, Any]:
        """The values for `--json`: shares, with the ends of their 95 % intervals."""
        facts = {"metric": self.metric, "num_samples": self.num_samples, "data": self.data, "note": self.note or None}
        return {**facts, **{one.name: self._values(one) for one in self.models}}

    def _values(self, one: Answers) -> dict[str, Any]:
        total = self.num_samples
        values: dict[str, Any] = {"score": one.right / total, "interval": list(share_interval(one.right, total))}
        if one is not self.models[0]:
            margin = difference_margin(one.lost, one.gained, total)
            values |= {"difference": (one.gained - one.lost) / total, "margin": margin}
            values |= {"changed": one.changed, "lost": one.lost, "gained": one.gained}
        return values

    def facts(self) -> ScoreFacts:
        """For a record, in percent."""
        values = {one.name: self._values(one) for one in self.models}
        scores = tuple(
            ModelScore(name, 100 * found["score"], *(_percent(found.get(key)) for key in ("difference", "margin")))
            for name, found in values.items()
        )
        return ScoreFacts(self.metric, "%", scores, self.num_samples, self.data, self.note)

    def __str__(self) -> str:
        lines = [f"{self.metric} on {self.num_samples:,} samples ({self.data})"]
        lines += [f"{one.name} {self._shown(one)}" for one in self.models]
        return "\n".join([*lines, *([self.note] if self.note else [])])

    def _shown(self, one: Answers) -> str:
        found = self._values(one)
        score = f"{found['score']:.2%}"
        if one is self.models[0]:
            low, high = found["interval"]
            return f"{score} (95 % interval {low:.1%} to {high:.1%})"
        if not one.changed:
            return f"{score} (no answer changed)"
        difference, margin = 100 * found["difference"], 100 * found["margin"]
        chance = ", within chance" if abs(difference) <= margin else ""
        changes = f"{one.changed:,} answers changed: {one.lost:,} became wrong, {one.gained:,} right"
        return f"{score} ({difference:+.2f} ± {margin:.2f} points{chance}; {changes})"


@dataclass(frozen=True)
class Scores:
    """The scores of a user's own metric for each model."""

    models: dict[str, float]
    metric: str

    def to_dict(self) -> dict[str, Any]:
        return {"metric": self.metric, **{name: {"score": score} for name, score in self.models.items()}}

    def facts(self) -> ScoreFacts:
        """For a record."""
        return ScoreFacts(self.metric, "", tuple(ModelScore(name, score) for name, score in self.models.items()))

    def __str__(self) -> str:
        return "\n".join([self.metric, *(f"{name} {score:.6g}" for name, score in self.models.items())])


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


class NoScores(LoadingError):
    """Outputs and labels from which accuracy cannot be computed; `has_labels`: whether labels exist."""

    def __init__(self, message: str, *, has_labels: bool = True) -> None:
        super().__init__(message)
        self.has_labels = has_labels


@torch.no_grad()
def measure(
    models: Mapping[str, tuple[Predictor, str]],
    batches: Iterable[Any],
    source: nn.Module | int,
    *,
    data: Data,
    note: str = "",
    labelled: bool = True,
) -> Accuracy:
    """One pass over the data, in which every model answers every batch.

    `models`: each with its device. `source`: the model for whose inputs batches are split, or its number of inputs.
    `labelled=False`: the answers of the first model are the labels (agreement).
    """
    counts = {name: [0, 0, 0, 0] for name in models}
    total = 0
    for batch in batches:
        (args, kwargs), labels = _parted(batch, source)
        if labels is None and labelled:
            message = f"{data.description}: a batch has no labels; give (inputs, labels), or an array called labels"
            raise NoScores(message, has_labels=False)
        reference, known = None, torch.ones(0)
        for name, (model, device) in models.items():
            there = to_device((args, kwargs), device)
            answers = _classes(model(*there[0], **there[1]), labels, data)
            reference = answers if reference is None else reference
            expected = reference if labels is None else labels
            known, right = expected >= 0, answers == expected  # labels below 0 mean: ignore this sample
            was_right = reference == expected
            found = right, answers != reference, was_right & ~right, right & ~was_right
            counts[name] = [count + int((one & known).sum()) for count, one in zip(counts[name], found, strict=True)]
        total += int(known.sum())
    if not total:
        raise NoScores(f"{data.description}: it holds no labelled samples", has_labels=False)
    metric = "top-1 accuracy" if labelled else f"same top-1 as {next(iter(models))} (no labels)"
    models_answers = tuple(Answers(name, *count) for name, count in counts.items())
    return Accuracy(models_answers, total, data.description, note, metric)


def unknown_classes(where: str, num_folders: int | None, num_classes: int | None) -> str:
    """The message for folders whose classes differ from the model's."""
    return (
        f"{where}: {num_folders} folders, and the model has scores of {num_classes} classes: which is which is not "
        "known; name the folders by the numbers of the classes, or give --metric agreement, which needs no labels"
    )


def _parted(batch: Any, source: nn.Module | int) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], Tensor | None]:
    """The call and the labels of a batch; labels, if there are any, are whole numbers."""
    inputs, labels = parted(batch, source)
    if isinstance(source, nn.Module):
        return as_call(inputs, source), labels
    if isinstance(inputs, Mapping):
        return ((), dict(inputs)), labels
    return (inputs if isinstance(inputs, tuple) else (inputs,), {}), labels


def _classes(output: Any, labels: Tensor | None, data: Data) -> Tensor:
    """The class with the largest score, (samples, ...), on the CPU."""
    where = data.description
    scores = scores_in(output)
    if isinstance(scores, str):
        raise NoScores(f"{where}: {scores}; give --metric MODULE:FUNCTION, which gets the model and returns a score")
    classes, num_classes = scores.argmax(1).cpu(), scores.shape[1]
    if labels is None:
        return classes
    largest, fault = int(labels.max()) if labels.numel() else 0, ""
    if classes.shape != labels.shape:
        fault = f"{where}: labels of shape {tuple(labels.shape)} and scores of shape {tuple(scores.shape)}; give one "
        fault += "label for each sample, or --metric MODULE:FUNCTION"
    elif largest >= num_classes:
        fault = (
            f"{where}: label {largest}, and the model has scores of {num_classes} classes (0 and up); give labels in "
        )
        fault += "the order of its outputs"
    elif data.num_classes not in (None, num_classes):
        fault = unknown_classes(where, data.num_classes, num_classes)
    if fault:
        raise NoScores(fault)
    return classes
