"""Top-1 of a classifier: the share of samples whose largest score is at the label or at the float model's class."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import CalibrationError
from sparsebit.execution.batches import Call, as_call, to_device
from sparsebit.graph.values.nested import tensors_of
from sparsebit.tensor_files import digest

# Keys of a mapping that hold labels.
LABELS = ("labels", "label", "targets", "target", "y")
_OTHER_BATCHES = (
    "accuracy_gains(): agreement with the float model needs the same batches in every pass, and the data gives others "
    "(a loader that shuffles, random augmentation, a model that writes into its inputs); pass a list of batches, or a "
    "loader with shuffle=False"
)


class LabelledBatches:
    """Batches `(inputs, labels)`, or mappings with labels in them; a batch without labels is an error."""

    def __init__(self, batches: Iterable[Any], model: nn.Module, device: torch.device | str | None) -> None:
        self.batches, self.model, self.device = batches, model, device
        self.num_samples = sum(len(labels) for _, labels in self)
        if not self.num_samples:
            raise CalibrationError("accuracy_gains() was given no data; give batches (inputs, labels), in a list")

    def __iter__(self) -> Iterator[tuple[Call, Tensor]]:
        for place, batch in enumerate(self.batches):
            inputs, labels = _parted(batch, self.model)
            if labels is None:
                raise CalibrationError(
                    f"accuracy_gains(): batch {place} has no labels; give batches (inputs, labels) with the number of "
                    "the class of every sample, or a function as metric=, or metric='agreement' (with the float model)"
                )
            yield as_call(inputs, self.model), labels

    def accuracy(self, model: nn.Module) -> float:
        """The share of samples whose largest score is at the label."""
        right = total = 0
        for call, labels in self:
            classes, num_classes = predicted(model, to_device(call, self.device))
            if classes.shape != labels.shape:
                raise CalibrationError(
                    f"accuracy_gains(): labels of shape {tuple(labels.shape)} do not fit {num_classes} classes "
                    f"for {tuple(classes.shape)}; give a function as metric= for another kind of output"
                )
            if labels.numel() and int(labels.max()) >= num_classes:
                raise CalibrationError(
                    f"accuracy_gains(): label {int(labels.max())}, but the model has scores of {num_classes} classes "
                    "(0 and up); give labels in the order of its outputs"
                )
            known = labels >= 0  # -100 and the like are ignored
            right += int(((classes == labels) & known).sum())
            total += int(known.sum())
        return right / max(total, 1)


class Agreement:
    """The share of samples whose largest score is where it was when this object was made.

    Every pass must yield the same batches: their checksums are compared.
    """

    def __init__(self, batches: Iterable[Any], model: Any) -> None:
        self.batches, self.source, self.device = batches, model.original, model.device
        self.expected: list[Tensor] = []
        self.checksums: list[str] = []
        for call in self._calls():
            self.checksums.append(_checksum(call))  # first: a model may write into its inputs
            self.expected.append(predicted(model, call)[0])
        self.num_samples = sum(map(len, self.expected))
        if not self.num_samples:
            raise CalibrationError("accuracy_gains() was given no data; give batches as for calibration, in a list")

    def _calls(self) -> Iterator[Call]:
        for batch in self.batches:
            yield to_device(as_call(_parted(batch, self.source)[0], self.source), self.device)

    def __call__(self, model: nn.Module) -> float:
        same = total = num_batches = 0
        for call in self._calls():
            if self.checksums[num_batches : num_batches + 1] != [_checksum(call)]:
                raise CalibrationError(_OTHER_BATCHES)
            expected = self.expected[num_batches]
            same += int((predicted(model, call)[0] == expected).sum())
            total, num_batches = total + expected.numel(), num_batches + 1
        if num_batches != len(self.expected):
            raise CalibrationError(_OTHER_BATCHES)
        return same / total


def _checksum(call: Call) -> str:
    return digest({str(place): tensor for place, tensor in enumerate(tensors_of(call))})


@torch.no_grad()
def predicted(model: Any, call: Call) -> tuple[Tensor, int]:
    """The class of each sample on the CPU, and the number of classes, from scores (samples, classes, ...)."""
    args, kwargs = call
    output = model(*args, **kwargs)
    if isinstance(output, Mapping):
        output = output.get("logits", next(iter(output.values()), None))
    elif isinstance(output, (tuple, list)) and output:
        output = output[0]
    if not isinstance(output, Tensor) or not output.is_floating_point() or output.dim() < 2 or output.shape[1] < 2:
        shown = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"type {type(output).__name__}"
        raise CalibrationError(
            f"accuracy_gains(): an output of {shown} is not scores of classes, (samples, classes); pass a function as "
            "metric=, which gets the model and returns a score"
        )
    return output.argmax(1).cpu(), output.shape[1]


def _parted(batch: Any, model: nn.Module) -> tuple[Any, Tensor | None]:
    """The batch without its labels, and the labels, if it has any: whole numbers."""
    if isinstance(batch, Mapping):
        found = next((key for key in LABELS if _are_labels(batch.get(key))), None)
        return ({k: v for k, v in batch.items() if k != found}, batch[found].cpu()) if found else (batch, None)
    if isinstance(batch, (tuple, list)):
        inputs = as_call(batch, model)[0]
        rest = batch[len(inputs) :]
        if len(rest) and _are_labels(rest[0]):
            return tuple(inputs), rest[0].cpu()
    return batch, None


def _are_labels(value: Any) -> bool:
    is_numbers = isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex()
    return is_numbers and value.dim() > 0 and value.dtype != torch.bool
