"""Right answers of several models on the same samples: counts, intervals, and what cannot be counted."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsebit.cli.inputs.accuracy import Accuracy, Answers, NoScores, measure
from sparsebit.cli.inputs.data import Data
from sparsebit.numerics.intervals import difference_margin, share_interval

X = torch.eye(4)


def data(*batches: Any, num_classes: int | None = None) -> Data:
    return Data("four samples", lambda: iter(batches), num_classes)


class Shifted(nn.Module):
    """Answers with the class of the sample, moved by `by` for samples 2 and 3."""

    def __init__(self, by: int = 0) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x[:, 2:].sum(1, keepdim=True) > 0, x.roll(self.by, 1), x)


def models(*shifts: int) -> dict[str, Any]:
    return {name: (Shifted(by), "cpu") for name, by in zip(("float", "simulation", "file"), shifts, strict=False)}


def test_counts() -> None:
    labels = torch.tensor([0, 0, 2, 0])  # float is right on 0 and 2; moved by one, on 0 and 3
    found = measure(models(0, 1, 0), data((X, labels)), Shifted(), data=data())
    assert found.models == (Answers("float", 2), Answers("simulation", 2, 2, 1, 1), Answers("file", 2))
    assert found.num_samples == 4
    told = found.to_dict()
    assert told["simulation"] | {"interval": None} == {
        "score": 0.5,
        "interval": None,
        "difference": 0.0,
        "margin": difference_margin(1, 1, 4),
        "changed": 2,
        "lost": 1,
        "gained": 1,
    }
    assert "simulation 50.00% (+0.00 ± 56.58 points, within chance; 2 answers changed: 1 became wrong, 1 right)" in str(
        found
    )
    assert "file 50.00% (no answer changed)" in str(found)


@pytest.mark.parametrize("batch", [
    (X, torch.arange(4)), [X, torch.arange(4, dtype=torch.int32)], {"x": X, "labels": torch.arange(4)},
    {"x": X, "y": torch.arange(4)}, (X, torch.arange(4), "names"),
])  # fmt: skip
def test_labels_of_any_batch(batch: Any) -> None:
    assert measure(models(0), data(batch), Shifted(), data=data()).models[0].right == 4


def test_labels_below_zero_are_left_out() -> None:
    found = measure(models(0, 1), data((X, torch.tensor([0, 1, 2, -100]))), Shifted(), data=data())
    assert found.num_samples == 3 and found.models[1] == Answers("simulation", 2, 1, 1, 0)


def test_agreement_needs_no_labels() -> None:
    found = measure(models(0, 1), data(X, (X,)), Shifted(), data=data(), labelled=False)
    assert found.models[1] == Answers("simulation", 4, 4, 4, 0) and "no labels" in found.metric


def test_data_that_differs_in_every_pass_is_read_once() -> None:
    passes = itertools.count()
    walked = Data("random", lambda: iter([(X.roll(next(passes), 0), torch.arange(4))]))
    measure(models(0, 0, 0), walked, Shifted(), data=walked)
    assert next(passes) == 1


@pytest.mark.parametrize(
    ("batches", "message", "has_labels"),
    [
        ([X], "a batch has no labels", False),
        ([(X, torch.rand(4))], "a batch has no labels", False),
        ([], "holds no labelled samples", False),
        ([(X, torch.arange(1, 5))], "label 4, and the model has scores of 4 classes", True),
        ([(X, torch.zeros(4, 2, dtype=torch.long))], "labels of shape", True),
        ([(X[:, :1], torch.arange(4))], "is not scores of classes", True),
    ],
)
def test_what_cannot_be_counted(batches: list[Any], message: str, has_labels: bool) -> None:
    plain = {"float": (nn.Identity(), "cpu")}
    with pytest.raises(NoScores, match=message) as caught:
        measure(plain, data(*batches), 1, data=data())
    assert caught.value.has_labels == has_labels


def test_folders_that_are_not_the_classes() -> None:
    with pytest.raises(NoScores, match="3 folders, and the model has scores of 4 classes"):
        measure(models(0), data((X, torch.arange(4))), Shifted(), data=data(num_classes=3))


@pytest.mark.parametrize(("right", "total"), [(0, 10), (10, 10), (500, 1000)])
def test_intervals_hold_the_share(right: int, total: int) -> None:
    low, high = share_interval(right, total)
    assert 0 <= low <= right / total <= high <= 1 and high - low > 0


def test_the_note_is_the_last_line() -> None:
    told = str(Accuracy((Answers("float", 1),), 2, "it", "Look."))
    assert told.splitlines() == [
        "top-1 accuracy on 2 samples (it)",
        "float 50.00% (95 % interval 9.5% to 90.5%)",
        "Look.",
    ]
