"""The forms of a metric, and how outputs are compared without labels."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sparsebit.compress.judging.metrics import (
    COSINE,
    NOISE,
    SAME_TOP1,
    TOP1,
    OfModel,
    PerSample,
    WholeSet,
    as_scores,
    first_output,
    has_own_data,
    labels_of,
    read_metric,
)
from sparsebit.errors import CalibrationError, ConfigError

LOGITS = torch.tensor([[3.0, 1.0], [0.0, 2.0], [1.0, 0.0]])


@pytest.mark.parametrize(
    ("outputs", "chosen"),
    [
        (LOGITS, SAME_TOP1),
        ({"logits": LOGITS}, SAME_TOP1),
        (F.normalize(torch.randn(4, 8), dim=1), COSINE),
        (torch.randn(4, 8, 6), NOISE),
        (torch.randn(4, 1), NOISE),
        ((LOGITS, torch.randn(3, 5)), NOISE),
    ],
    ids=["scores", "mapping", "unit vectors", "maps", "one value", "several"],
)
def test_the_kind_of_output_chooses_the_comparison(outputs: Any, chosen: PerSample) -> None:
    assert read_metric(None, outputs, None) is chosen


def test_outputs_without_numbers_cannot_be_compared() -> None:
    with pytest.raises(ConfigError, match="no float output"):
        read_metric(None, torch.tensor([1, 2]), None)


def test_top1_counts_labels() -> None:
    batch = (torch.zeros(3, 4), torch.tensor([0, 1, 1]))
    assert read_metric("top1", LOGITS, batch) is TOP1
    assert TOP1.scores(LOGITS, batch, None).tolist() == [True, True, False]
    with pytest.raises(CalibrationError, match="give batches"):
        read_metric("accuracy", LOGITS, torch.zeros(3, 4))


@pytest.mark.parametrize(
    ("batch", "labels"),
    [
        ((torch.zeros(2, 3), torch.tensor([1, 0])), [1, 0]),
        ({"x": torch.zeros(2, 3), "labels": torch.tensor([1, 0])}, [1, 0]),
        ((torch.zeros(2, 3), torch.zeros(2)), None),
        (torch.zeros(2), None),
        ((torch.zeros(2, 3), torch.tensor([True, False])), None),
    ],
)
def test_labels(batch: Any, labels: list[int] | None) -> None:
    found = labels_of(batch)
    assert (None if found is None else found.tolist()) == labels


def test_noise_is_in_percent_of_the_signal() -> None:
    reference = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    ours = torch.tensor([[3.0, 4.5], [1.0, 0.0]])
    assert NOISE.scores(ours, None, reference).tolist() == pytest.approx([-10.0, 0.0])
    assert NOISE.scores(torch.full((1, 2), torch.nan), None, reference[:1]).tolist() == [-100.0]


def test_forms_of_functions() -> None:
    def evaluate(model: Any) -> float:
        return 1.0

    def per_sample(outputs: Tensor, batch: Any) -> Tensor:
        return outputs[:, 0]

    def of_batch(outputs: Tensor, batch: Any) -> float:
        return float(outputs.mean())

    assert isinstance(read_metric(evaluate, LOGITS, None), OfModel)
    assert isinstance(read_metric(WholeSet(lambda outputs, batches: 0.0), LOGITS, None), WholeSet)
    assert read_metric(NOISE, LOGITS, None) is NOISE and not has_own_data(NOISE)
    metric = read_metric(per_sample, LOGITS, None)
    assert isinstance(metric, PerSample) and metric.name == "per_sample"
    assert metric.scores(LOGITS, None, None).tolist() == [3.0, 0.0, 1.0]
    with pytest.raises(ConfigError, match="one number per sample, or wrap"):
        read_metric(of_batch, LOGITS, None).scores(LOGITS, None, None)  # type: ignore[union-attr]
    for wrong in ("acuracy", 5):
        with pytest.raises(ConfigError, match="allowed: top1, agreement"):
            read_metric(wrong, LOGITS, None)


def test_a_number_is_not_one_score_per_sample() -> None:
    assert as_scores(0.5, "m") is None and as_scores(torch.tensor(0.5), "m") is None
    assert as_scores([True, False], "m").tolist() == [True, False]  # type: ignore[union-attr]


@pytest.mark.parametrize("value", [None, "0.9", [[1.0], [1.0, 2.0]], torch.zeros(2, dtype=torch.complex64)])
def test_what_is_no_score_is_named(value: Any) -> None:
    with pytest.raises(ConfigError, match="metric=m: it returned"):
        as_scores(value, "m")


def test_scores_are_copied_because_a_metric_may_reuse_its_tensor() -> None:
    own = torch.zeros(2)
    found = as_scores(own, "m")
    own.fill_(1.0)
    assert found is not None and found.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("labels", [[1, 2, 2], [-1, 0, 1]], ids=["from one on", "below zero"])
def test_labels_that_are_no_class_are_refused(labels: list[int]) -> None:
    with pytest.raises(CalibrationError, match=r"labels from -?1 to [12], and 2 classes, which are 0 to 1"):
        read_metric("top1", LOGITS, (torch.zeros(3, 4), torch.tensor(labels)))


def test_the_scores_among_the_outputs() -> None:
    assert first_output(OrderedDict(loss=torch.zeros(3), logits=LOGITS)).equal(LOGITS)
    assert first_output((torch.tensor([1]), LOGITS)).equal(LOGITS)
