"""The tasks of `compress.py`: each with samples to calibrate, to select by, and to judge that no tool has seen."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from models import cifar, efficientnet_lite0, minilm_pairs, yolov5n_evaluation
from torch import nn

from sparsebit.compress import WholeSet

_SELECT = 2000  # of the 5,000 CIFAR images


@dataclass(frozen=True)
class Case:
    """`validation`: what a tool may select by. `unseen`: the final judgement, with the same metric, in points."""

    name: str
    model: nn.Module
    calibration: list[Any]
    validation: list[Any]
    unseen: list[Any]
    metric: Any = "top1"
    has_transformer: bool = False


def _classifier(name: str) -> Case:
    task = cifar(name)
    images, labels = task.images, task.labels
    assert images is not None and labels is not None
    parts = [
        list(zip(images[where].split(100), labels[where].split(100), strict=True))
        for where in (slice(0, _SELECT), slice(_SELECT, None))
    ]
    return Case(name, task.model, task.calibration, *parts, has_transformer=name == "vit")


def _imagenet() -> Case:
    task = efficientnet_lite0()
    assert task.images is not None and task.labels is not None
    batches = list(zip(task.images.split(16), task.labels.split(16), strict=True))
    return Case(task.name, task.model, task.calibration, batches[0::2], batches[1::2])


def _minilm() -> Case:
    """Sentence pairs, side by side in a batch: dev selects, test judges."""
    model, calibration, pairs = minilm_pairs()
    return Case(
        "minilm",
        model,
        calibration,
        pairs("stsb_dev.tsv"),
        pairs("stsb_test.tsv"),
        WholeSet(spearman, "Spearman correlation"),
        has_transformer=True,
    )


def spearman(outputs: list[Any], batches: list[Any]) -> float:
    """Of the cosine similarity of neighbours in a batch with their label, times 100."""
    from scipy.stats import spearmanr

    similar, wanted = [], []
    for found, batch in zip(outputs, batches, strict=True):
        mask = batch["attention_mask"].unsqueeze(-1)
        rows = nn.functional.normalize((found.last_hidden_state * mask).sum(1) / mask.sum(1), dim=1)
        similar.append((rows[0::2] * rows[1::2]).sum(1))
        wanted.append(batch["labels"][0::2])
    return 100 * float(spearmanr(torch.cat(similar).numpy(), torch.cat(wanted).numpy()).statistic)


def _yolov5n() -> Case:
    """COCO: every second of 50 images selects, the others judge."""
    model, calibration, batches, average_precision = yolov5n_evaluation()

    def score(outputs: list[Any], chosen: list[Any]) -> float:
        with contextlib.redirect_stdout(io.StringIO()):
            return 100 * average_precision(outputs, chosen)

    return Case("yolov5n", model, calibration, batches[0::2], batches[1::2], WholeSet(score, "mAP 50-95"))


CASES: dict[str, Callable[[], Case]] = {
    **{name: (lambda name=name: _classifier(name)) for name in ("resnet20", "mobilenetv2", "vit")},
    "efficientnet_lite0": _imagenet,
    "minilm": _minilm,
    "yolov5n": _yolov5n,
}
