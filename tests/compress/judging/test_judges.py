"""Judgements: paired differences, early decisions, and samples that selection does not see."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsebit.compress.judging.judges import FIRST_LOOK, judge_of, paired
from sparsebit.compress.judging.metrics import TOP1, OfModel, WholeSet, read_metric
from sparsebit.errors import CalibrationError, ConfigError


class Right(nn.Module):
    """A classifier of `x[:, 0]`, wrong on the samples whose `x[:, 1]` is below `share`."""

    def __init__(self, share: float = 0.0) -> None:
        super().__init__()
        self.share, self.num_samples = share, 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_samples += len(x)
        labels = x[:, 0].long() ^ (x[:, 1] < self.share).long()
        return nn.functional.one_hot(labels, 2).float()


def batches(count: int, size: int = 32, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 2, generator=made)
    x[:, 0] = (x[:, 0] > 0.5).float()
    return [(part, part[:, 0].long()) for part in x.split(size)]


def judge(metric: Any = TOP1, count: int = 1024) -> Any:
    return judge_of(metric, Right(), batches(count), batches(count, seed=1))


def test_a_bad_candidate_costs_few_samples() -> None:
    bad = Right(0.5)
    found = judge().select(bad, 1.0)
    assert found.num_samples == bad.num_samples == FIRST_LOOK
    assert found.is_decided and found.loss > 30


def test_a_candidate_near_the_limit_uses_all_samples_and_a_perfect_one_needs_not() -> None:
    near = Right(0.02)
    found = judge().select(near, 2.0)
    assert found.num_samples == 1024 and not found.is_decided
    assert abs(found.loss - 100 * 0.02) < 1.5 and 0 < found.bound < 3
    assert judge().select(Right(), 5.0).num_samples < 1024


def test_without_a_limit_all_samples_count_unless_it_cannot_be_the_best() -> None:
    assert judge().select(Right(0.3), None).num_samples == 1024
    assert judge().select(Right(0.3), None, rejects_above=1.0).num_samples == FIRST_LOOK
    assert judge().select(Right(0.001), None, rejects_above=1.0).num_samples == 1024


def test_the_final_judgement_uses_other_samples() -> None:
    seen: list[Tensor] = []

    class Recorded(Right):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x)
            return super().forward(x)

    made, model = judge(), Recorded()
    made.select(model, None)
    selected = torch.cat(seen)
    seen.clear()
    made.conclude(model, None)
    final = torch.cat(seen)
    assert not (selected[:, None, 1] == final[None, :, 1]).any()


def test_the_float_model_runs_once_on_each_batch() -> None:
    reference = Right()
    made = judge_of(TOP1, reference, batches(128), batches(128, seed=1))
    for _ in range(3):
        made.select(Right(0.1), None)
    assert reference.num_samples == 128


def test_the_interval_covers_the_truth() -> None:
    """Of 200 draws of 400 samples, the 95 % interval holds the true loss nearly always."""
    inside = 0
    for seed in range(200):
        made = judge_of(TOP1, Right(), batches(400, size=400, seed=seed), [])
        found = made.select(Right(0.05), None)
        inside += abs(found.loss - 5.0) <= found.bound
    assert inside >= 180


def test_paired_scores() -> None:
    theirs, ours = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, 1.5, 2.5])
    found = paired("m", "u", theirs, ours, 1.0, 0.95)
    assert (found.float_score, found.score, found.loss, found.bound) == (2.0, 1.5, 0.5, 0.0)
    with pytest.raises(CalibrationError, match="not finite"):
        paired("m", "u", theirs, torch.tensor([1.0, torch.nan, 1.0]), None, 0.95)
    with pytest.raises(CalibrationError, match="no samples"):
        paired("m", "u", torch.zeros(0), torch.zeros(0), None, 0.95)


def test_no_changed_answer_is_no_proof() -> None:
    same = torch.ones(20, dtype=torch.bool)
    assert paired("m", "u", same, same, 0.5, 0.95).bound > 0.5  # type: ignore[operator]
    assert not paired("m", "u", same, same, 0.5, 0.95).is_decided


class TestMetricOfTheModel:
    def test_a_number_has_no_bound(self) -> None:
        made = judge(OfModel(lambda model: 100.0 * (1 - getattr(model, "share", 0.0)), "own"))
        found = made.select(Right(0.1), 1.0)
        assert found.loss == pytest.approx(10.0) and found.bound is None and found.is_decided

    def test_one_score_per_sample_is_parted(self) -> None:
        scores = torch.arange(10.0)
        made = judge(OfModel(lambda model: scores - getattr(model, "share", 0.0) * scores, "own"))
        assert made.select(Right(0.5), None).float_score == 4.0  # 0, 2, 4, 6, 8
        assert made.conclude(Right(0.5), None).float_score == 5.0  # 1, 3, 5, 7, 9

    @pytest.mark.parametrize("value", ["0.9", None, float("nan")])
    def test_anything_else_is_refused(self, value: Any) -> None:
        with pytest.raises(ConfigError, match="metric=own: it returned"):
            judge(OfModel(lambda model: value, "own")).select(Right(), None)


def test_a_metric_of_all_samples_together_has_a_jackknife_bound() -> None:
    def share_right(outputs: list[Tensor], batches: list[Any]) -> float:
        hits = [(out.argmax(1) == batch[1]).float() for out, batch in zip(outputs, batches, strict=True)]
        return 100 * float(torch.cat(hits).mean())

    found = judge(WholeSet(share_right, "share")).select(Right(0.1), 1.0)
    plain = judge().select(Right(0.1), None)
    assert found.loss == pytest.approx(plain.loss)
    assert found.bound == pytest.approx(plain.bound, rel=0.7)


class TestChecks:
    """Faults of a metric are raised before a candidate is made."""

    @pytest.mark.parametrize(
        ("score", "message"),
        [
            (lambda outputs, batch: torch.full((len(outputs),), torch.nan), "not finite"),
            (lambda outputs, batch: outputs[:, 0].mean(), "it returned one number for a batch"),
            (lambda outputs, batch: outputs[:, 0].mean()[None], "one score for a batch of 32 samples"),
            (lambda outputs, batch: None, "it returned NoneType"),
        ],
        ids=["not finite", "a number", "a mean", "nothing"],
    )
    def test_scores_of_samples(self, score: Any, message: str) -> None:
        metric = read_metric(score, None, None)
        with pytest.raises((ConfigError, CalibrationError), match=message):
            judge(metric).check()

    @pytest.mark.parametrize("value", [None, float("nan"), torch.ones(3)], ids=["nothing", "not finite", "several"])
    def test_scores_of_all_samples_together(self, value: Any) -> None:
        with pytest.raises(ConfigError, match="metric=set: it returned"):
            judge(WholeSet(lambda outputs, batches: value, "set")).check()

    def test_what_is_right(self) -> None:
        for metric in (TOP1, OfModel(lambda model: 1.0, "own"), WholeSet(lambda outputs, batches: 1.0)):
            judge(metric).check()
        one = [(torch.rand(1, 2), torch.zeros(1).long())] * 4
        judge_of(read_metric(lambda outputs, batch: outputs[:, 0], None, None), Right(), one, one).check()


def test_a_part_of_the_samples_without_a_score_leaves_no_bound() -> None:
    metric = WholeSet(lambda outputs, batches: 1.0 if len(batches) == 4 else math.nan)
    found = judge(metric, count=128).select(Right(0.1), 1.0)
    assert found.loss == 0.0 and found.bound is None


def test_a_metric_that_writes_into_outputs_and_batches_changes_neither() -> None:
    def score(outputs: Tensor, batch: Any) -> Tensor:
        found = outputs.argmax(1) == batch[1]
        outputs.neg_()
        batch[0].zero_()
        return found

    def scores(outputs: list[Tensor], batches: list[Any]) -> float:
        hits = torch.cat([score(out, batch) for out, batch in zip(outputs, batches, strict=True)])
        outputs.clear()
        return 100 * float(hits.double().mean())

    expected = judge().select(Right(0.1), None)
    for metric in (read_metric(score, None, None), WholeSet(scores)):
        data = batches(1024)
        made = judge_of(metric, Right(), data, data)
        made.check()
        for _ in range(2):
            assert made.select(Right(0.1), None).loss == pytest.approx(expected.loss)
        assert all(one[0].equal(other[0]) for one, other in zip(data, batches(1024), strict=True))


def test_an_evaluation_that_changes_the_model_gets_a_copy_of_the_float_model() -> None:
    def evaluate(model: Any) -> float:
        model.share = 1.0
        model.train()
        return 100.0

    reference = Right().eval()
    made = judge_of(OfModel(evaluate, "own"), reference, [], [])
    made.check()
    made.select(Right(), 1.0)
    assert reference.share == 0.0 and not reference.training


def test_an_evaluation_with_another_number_of_scores_is_refused() -> None:
    sizes = iter([4, 5])
    made = judge(OfModel(lambda model: torch.ones(next(sizes)), "own"))
    with pytest.raises(CalibrationError, match="own: 5 scores, and 4 of float"):
        made.select(Right(), 1.0)


def test_a_model_that_writes_into_its_inputs_does_not_change_the_samples() -> None:
    class Writes(Right):
        def forward(self, x: Tensor) -> Tensor:
            found = super().forward(x)
            x.zero_()
            return found

    data = batches(64)
    before = data[0][0].clone()
    judge_of(TOP1, Right(), data, data).select(Writes(), None)
    assert data[0][0].equal(before)
