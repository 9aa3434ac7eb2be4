"""The metric of a search: the user's own in one of its forms, or the agreement with the float model.

A metric is a score, higher is better. It has one of these forms:

- a name: "top1", of batches with labels; "agreement", without labels: `agreement` chooses how outputs are compared;
- a function of one argument, `evaluate(model)`, with data of its own: returns a number, or one number per sample;
- a function of two arguments, `metric(outputs, batch)`: one number per sample of the batch;
- `PerSample(scores, name, unit)`, such a function of outputs, batch and the float model's outputs, with its unit;
- `WholeSet(function)`, for scores that are not a mean over samples (mAP, correlation): `function(outputs, batches)`
  with lists of both returns one number.

Scores of type bool (right or wrong) count in percent.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.execution.batches import as_call
from sparsebit.graph.values.nested import tensors_of
from sparsebit.quantization.inspecting.class_scores import LABELS

POINTS = "points"


@dataclass(frozen=True)
class PerSample:
    """A metric with one score per sample: `scores(outputs, batch, reference)`.

    `needs_reference`: `reference` must be the float model's outputs on this batch; otherwise it is not used.
    """

    scores: Callable[[Any, Any, Any], Tensor]
    name: str
    unit: str = POINTS
    needs_reference: bool = False


@dataclass(frozen=True)
class WholeSet:
    """A metric of all samples together: `function(outputs, batches)` returns one number, higher is better."""

    function: Callable[[list[Any], list[Any]], float]
    name: str = ""
    unit: str = POINTS


@dataclass(frozen=True)
class OfModel:
    """A metric with data of its own: `function(model)` returns a number, or one number per sample."""

    function: Callable[[Any], Any]
    name: str
    unit: str = POINTS


def is_right(outputs: Any, batch: Any, reference: Any) -> Tensor:
    """Whether the largest score is at the label."""
    del reference
    scores, labels = first_output(outputs), labels_of(batch)
    if labels is None or scores.dim() != 2 or labels.shape != scores.shape[:1]:
        found = "no whole numbers, one per sample," if labels is None else f"shape {tuple(labels.shape)}"
        raise CalibrationError(
            f"metric='top1': outputs of shape {tuple(scores.shape)}, and {found} as labels; give batches "
            "(inputs, labels), or a function as metric="
        )
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < scores.shape[1]:
        raise CalibrationError(
            f"metric='top1': labels from {int(labels.min())} to {int(labels.max())}, and {scores.shape[1]} classes, "
            f"which are 0 to {scores.shape[1] - 1}; give labels in that range, or a function as metric="
        )
    return scores.argmax(1) == labels


def has_same_top1(outputs: Any, batch: Any, reference: Any) -> Tensor:
    """Whether the largest score is where the float model has it."""
    del batch
    return first_output(outputs).argmax(1) == first_output(reference).argmax(1)


def cosine(outputs: Any, batch: Any, reference: Any) -> Tensor:
    """The cosine between both outputs, in percent."""
    del batch
    one, other = first_output(outputs).flatten(1).double(), first_output(reference).flatten(1).double()
    return 100 * torch.nn.functional.cosine_similarity(one, other, dim=1, eps=1e-12)


def noise(outputs: Any, batch: Any, reference: Any) -> Tensor:
    """The negated ratio of noise to signal over all float outputs, in percent: -1 % is an SQNR of 40 dB."""
    del batch
    pairs = list(zip(_floats(outputs), _floats(reference), strict=True))
    signal, error = torch.zeros(()).double(), torch.zeros(()).double()
    for ours, theirs in pairs:
        rows = theirs.double().reshape(len(theirs), -1)
        signal = signal + rows.square().sum(1)
        error = error + (ours.double().reshape(len(theirs), -1) - rows).square().sum(1)
    share = error.sqrt() / signal.sqrt().clamp_min(1e-30)
    return -100 * share.nan_to_num(nan=1.0).clamp(max=1.0)


TOP1 = PerSample(is_right, "top-1 accuracy")
SAME_TOP1 = PerSample(has_same_top1, "same top-1 as float", needs_reference=True)
COSINE = PerSample(cosine, "cosine to the float outputs", "percent", needs_reference=True)
NOISE = PerSample(noise, "noise of the outputs (SQNR)", "percent", needs_reference=True)

Metric = PerSample | WholeSet | OfModel


def read_metric(given: Any, outputs: Any, batch: Any) -> Metric:
    """The metric in one of its forms. `outputs`: of the float model on `batch`, which show what can be compared."""
    if isinstance(given, (PerSample, WholeSet, OfModel)):
        return given
    if given is None or given == "agreement":
        return agreement(outputs)
    if isinstance(given, str):
        if given.lower() in ("top1", "top-1", "accuracy"):
            is_right(outputs, batch, None)  # raises for labels that are missing
            return TOP1
        raise ConfigError(
            f"metric={given!r}: allowed: top1, agreement, or a function; see sparsebit.compress.judging.metrics"
        )
    if not callable(given):
        raise ConfigError(f"metric of type {type(given).__name__}: allowed: top1, agreement, or a function")
    name = getattr(given, "__name__", type(given).__name__)
    return OfModel(given, name) if has_own_data(given) else PerSample(_scores_by(given, name), name)


def has_own_data(given: Any) -> bool:
    """Whether a metric is a function of the model alone, which has data of its own."""
    return isinstance(given, OfModel) or (
        callable(given) and not isinstance(given, WholeSet) and _num_arguments(given) < 2
    )


def agreement(outputs: Any) -> PerSample:
    """How outputs are compared without labels: class scores by top-1, unit vectors by cosine, all others by noise."""
    found = _floats(outputs)
    if not found:
        raise ConfigError("the model has no float output to compare; give metric=, a function of the outputs")
    first = found[0]
    if len(found) > 1 or first.dim() != 2 or first.shape[1] < 2:
        return NOISE
    lengths = first.double().norm(dim=1)
    return COSINE if torch.allclose(lengths, torch.ones_like(lengths), atol=1e-3) else SAME_TOP1


def _scores_by(function: Callable[[Any, Any], Any], name: str) -> Callable[[Any, Any, Any], Tensor]:
    """The user's `metric(outputs, batch)`."""

    def scores(outputs: Any, batch: Any, reference: Any) -> Tensor:
        del reference
        found = as_scores(function(outputs, batch), name)
        if found is None:
            raise ConfigError(
                f"metric={name}: it returned one number for a batch; return one number per sample, or wrap a function "
                "of lists of outputs and batches: metric=sparsebit.compress.WholeSet(function)"
            )
        return found

    return scores


def as_scores(value: Any, name: str) -> Tensor | None:
    """One score per sample as a new tensor; None if `value` is a single number. `name`: of the metric, for errors."""
    try:
        tensor = torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        tensor = None
    if tensor is None or tensor.is_complex():
        kind = type(value).__name__ if tensor is None else tensor.dtype
        raise ConfigError(f"metric={name}: it returned {kind}; return a number, or one per sample")
    # A copy, because a metric may fill the same tensor again at the next batch.
    return None if tensor.dim() == 0 else tensor.flatten().clone()


def labels_of(batch: Any) -> Tensor | None:
    """The labels of a batch: the last of a tuple, or the entry of a mapping that is called so."""
    found: Any = None
    if isinstance(batch, Mapping):
        found = next((batch[name] for name in LABELS if name in batch), None)
    elif isinstance(batch, (tuple, list)) and len(batch) > 1:
        found = batch[-1]
    if found is None:
        return None
    tensor = torch.as_tensor(found)
    is_whole = not tensor.is_floating_point() and tensor.dtype != torch.bool
    return tensor.detach().cpu() if is_whole and tensor.dim() == 1 else None


def first_output(outputs: Any) -> Tensor:
    """The scores among the outputs: `logits` of a mapping, else the first float tensor."""
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else None
    if isinstance(logits, Tensor):
        return logits.detach().cpu()
    return _floats(outputs)[0]


def inputs_of(batch: Any, model: Any) -> Any:
    """The call of a batch for the model, without labels."""
    if isinstance(batch, Mapping):
        return as_call({key: value for key, value in batch.items() if key not in LABELS}, model)
    return as_call(batch, model)


def _floats(outputs: Any) -> Sequence[Tensor]:
    plain: Iterable[Tensor] = tensors_of(dict(outputs) if isinstance(outputs, Mapping) else outputs)
    return [tensor.detach().cpu() for tensor in plain if tensor.is_floating_point() and tensor.dim()]


def _num_arguments(function: Callable[..., Any]) -> int:
    """How many arguments without a default a function takes."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # compiled code has no Python signature
        return 1
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is p.empty for p in parameters)
