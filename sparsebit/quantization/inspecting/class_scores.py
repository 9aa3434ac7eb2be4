"""Top-1 accuracy of a classifier (against labels), and its agreement with the float model's classes (without)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
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
            inputs, labels = parted(batch, self.model)
            if labels is None:
                others = "a function as metric=, or metric='agreement' (with the float model)"
                raise CalibrationError(
                    f"accuracy_gains(): batch {place} has no labels; give (inputs, labels), {others}"
                )
            yield as_call(inputs, self.model), labels

    def accuracy(self, model: nn.Module) -> float:
        """The share of samples whose largest score is at the label."""
        right = total = 0
        for call, labels in self:
            classes, num_classes = predicted(model, to_device(call, self.device))
            fault = ""
            if classes.shape != labels.shape:
                shapes = f"{num_classes} classes for {tuple(classes.shape)}"
                fault = f"labels of shape {tuple(labels.shape)} do not fit {shapes}; give a function as metric="
            elif labels.numel() and int(labels.max()) >= num_classes:
                fault = f"label {int(labels.max())}, but the model has scores of {num_classes} classes (0 and up)"
            if fault:
                raise CalibrationError(f"accuracy_gains(): {fault}")
            known = labels >= 0  # -100 and the like are ignored
            right += int(((classes == labels) & known).sum())
            total += int(known.sum())
        return right / max(total, 1)


class Agreement:
    """The share of samples with the same class as in the first pass. Every pass needs the same batches in one order."""

    def __init__(self, batches: Iterable[Any], model: Any) -> None:
        self.batches, self.source, self.device = batches, model.original, model.device
        # The checksum is computed before the forward, because a model may write into its inputs.
        self.expected = [(_checksum(call), predicted(model, call)[0]) for call in self._calls()]
        self.num_samples = sum(len(classes) for _, classes in self.expected)
        if not self.num_samples:
            raise CalibrationError("accuracy_gains() was given no data; give batches as for calibration, in a list")

    def _calls(self) -> Iterator[Call]:
        for batch in self.batches:
            yield to_device(as_call(parted(batch, self.source)[0], self.source), self.device)

    def __call__(self, model: nn.Module) -> float:
        same = 0
        for call, known in zip_longest(self._calls(), self.expected):
            if call is None or known is None or known[0] != _checksum(call):
                raise CalibrationError(_OTHER_BATCHES)
            same += int((predicted(model, call)[0] == known[1]).sum())
        return same / sum(classes.numel() for _, classes in self.expected)


def _checksum(call: Call) -> str:
    return digest({str(place): tensor for place, tensor in enumerate(tensors_of(call))})


@torch.no_grad()
def predicted(model: Any, call: Call) -> tuple[Tensor, int]:
    """The class of each sample on the CPU, and the number of classes, from scores (samples, classes, ...)."""
    args, kwargs = call
    scores = scores_in(model(*args, **kwargs))
    if isinstance(scores, str):
        raise CalibrationError(f"accuracy_gains(): {scores}; pass a function of the model as metric=")
    return scores.argmax(1).cpu(), scores.shape[1]


def scores_in(output: Any) -> Tensor | str:
    """The scores (samples, classes, ...) in an output; a sentence if it has none."""
    if isinstance(output, Mapping):
        output = output.get("logits", next(iter(output.values()), None))
    elif isinstance(output, (tuple, list)) and output:
        output = output[0]
    if isinstance(output, Tensor) and output.is_floating_point() and output.dim() > 1 and output.shape[1] > 1:
        return output
    shown = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"type {type(output).__name__}"
    return f"an output of {shown} is not scores of classes, (samples, classes)"


def parted(batch: Any, model: nn.Module | int) -> tuple[Any, Tensor | None]:
    """The inputs of a batch, and its labels, if it has any: whole numbers. `model`: or the number of its inputs."""
    labels: Any = None
    if isinstance(batch, Mapping):
        found = next((key for key in LABELS if _are_labels(batch.get(key))), None)
        inputs: Any = {key: value for key, value in batch.items() if key != found}
        labels = None if found is None else batch[found]
    elif isinstance(batch, (tuple, list)):
        count = model if isinstance(model, int) else len(as_call(batch, model)[0])
        inputs, rest = tuple(batch[:count]), [_tensor(value) for value in batch[count : count + 1]]
        labels = rest[0] if rest and _are_labels(rest[0]) else None
    else:
        inputs = batch
    return inputs, None if labels is None else labels.detach().cpu().long()


def _tensor(value: Any) -> Any:
    """Convert labels, which are often numpy arrays next to tensors of images."""
    is_array = type(value).__module__ == "numpy" and hasattr(value, "astype") and value.dtype.kind in "iu"
    return torch.as_tensor(value.astype("int64")) if is_array else value


def _are_labels(value: Any) -> bool:
    is_numbers = isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex()
    return is_numbers and value.dim() > 0 and value.dtype != torch.bool
