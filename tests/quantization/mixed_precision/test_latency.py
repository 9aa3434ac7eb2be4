"""Limits on the measured time, with a stopwatch that knows what each layer takes; and a real session, without times."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import sparsebit
from sparsebit.deploy.audit.file_latency import Timed
from sparsebit.errors import BudgetError, ConfigError
from sparsebit.quantization import PlacementProfile, QuantModel, search_latency, sensitivity
from sparsebit.quantization.mixed_precision.latency import _weight_bytes
from sparsebit.quantization.mixed_precision.sensitivity import Sensitivity
from tests.quantization.placement_search.test_search import BATCH, Fake, Net, _trace_once  # noqa: F401

pytest.importorskip("scipy")
FAST = {"wise": 0.2, "Conv": 0.2, "Gemm": 0.2, "MatMul": 0.2}


@pytest.fixture(scope="module")
def qmodel() -> QuantModel:
    torch.manual_seed(0)
    return sparsebit.quantize(Net().eval(), [BATCH], "onnxruntime")


def scores_of(qmodel: QuantModel, weights: Mapping[str, float]) -> Sensitivity:
    """Weights cost this much, everything else nothing."""
    scores = {site: {8: weights.get(site.removesuffix(".weight"), 0.0)} for site in qmodel.plan}
    return Sensitivity("gradient", 8, scores)


class Slower(Fake):
    """Files with both kinds of layers take more than the sum of their regions."""

    factor = 1.3

    def ratios(self, files: Mapping[str, bytes], budget_s: float) -> dict[str, Timed]:
        found = super().ratios(files, budget_s)
        return {n: Timed(t.ratio * (self.factor if n.startswith("limit") else 1.0), t.noise) for n, t in found.items()}


class Faster(Slower):
    """They take less."""

    factor = 0.6


def test_what_costs_most_is_float_as_far_as_the_time_allows(qmodel: QuantModel) -> None:
    scores = scores_of(qmodel, {"point": 3.0, "head": 2.0, "stem": 0.5, "wise": 0.1})
    found = search_latency(qmodel, [BATCH], [0.45, 0.7, 1.0], scores=scores, stopwatch=Fake(FAST))
    assert [one.floats for one in found][:2] == [("point",), ("point", "head")]
    assert all(one.ratio <= one.limit for one in found)
    assert [one.loss for one in found] == pytest.approx([2.6, 0.6, 0.0])
    assert found[2].profile.is_float and found[2].floats == ("stem", "wise", "point", "head")
    for one in found:
        assert "point.weight" not in one.qmodel.plan and one.qmodel.placement == one.profile
    assert "stem.weight" in found[0].qmodel.plan and "point.weight" in qmodel.plan
    assert "limit 0.450 of float's time: measured" in str(found[0]) and "apart)" in str(found[0])


def test_the_sum_of_regions_is_compared_with_the_measured_whole(qmodel: QuantModel) -> None:
    scores = scores_of(qmodel, {"point": 1.0})
    (found,) = search_latency(qmodel, [BATCH], 0.6, scores=scores, stopwatch=Fake(FAST))
    assert found.predicted == pytest.approx(found.ratio, rel=0.1)
    assert found.default_predicted == pytest.approx(found.default_ratio, rel=0.1)


def test_a_file_that_is_slower_than_predicted_is_searched_again(qmodel: QuantModel) -> None:
    scores = scores_of(qmodel, {"point": 3.0, "head": 2.0, "stem": 0.5, "wise": 0.1})
    (found,) = search_latency(qmodel, [BATCH], 0.7, scores=scores, stopwatch=Slower(FAST))
    assert found.tries > 1 and found.ratio <= 0.7 and found.floats == ("point",)


def test_the_fastest_by_prediction_is_tried_where_it_does_not_keep_the_limit(qmodel: QuantModel) -> None:
    scores, times = scores_of(qmodel, {"stem": 1.0}), {**FAST, "wise": 3.0}
    with pytest.raises(BudgetError, match=r"placement=\"measured\""):
        search_latency(qmodel, [BATCH], 0.05, scores=scores, stopwatch=Fake(times))
    (found,) = search_latency(qmodel, [BATCH], 0.3, scores=scores, stopwatch=Faster(times))
    assert found.ratio <= 0.3 < found.predicted and found.tries == 1


def test_one_tensor_is_one_batch(qmodel: QuantModel) -> None:
    lone, listed = (
        search_latency(qmodel, data, 0.6, scores=scores_of(qmodel, {}), stopwatch=Fake(FAST))[0]
        for data in (BATCH, [BATCH])
    )
    assert lone.profile.shapes == listed.profile.shapes


def test_bytes_are_limited_too(qmodel: QuantModel) -> None:
    scores = scores_of(qmodel, {"stem": 3.0, "point": 1.0, "head": 1.0, "wise": 1.0})  # stem: most of the weights
    free, tight = (
        search_latency(qmodel, [BATCH], 0.45, max_bytes=limit, scores=scores, stopwatch=Fake(FAST))[0]
        for limit in (None, 0.5)
    )
    assert free.floats == ("stem",) and tight.floats and "stem" not in tight.floats


def test_scores_of_other_bits_are_not_those_of_the_file(qmodel: QuantModel) -> None:
    """With 4 bits `head` would cost most; the file has 8, and there it is `point`."""
    plain = scores_of(qmodel, {"point": 3.0, "head": 2.0, "stem": 0.5, "wise": 0.1})
    scores = {site: {**row, 4: 100.0 if site == "head.weight" else 1.0} for site, row in plain.scores.items()}
    both = Sensitivity("gradient", 8, scores)
    (found,) = search_latency(qmodel, [BATCH], 0.45, scores=both, stopwatch=Fake(FAST))
    assert found.floats == ("point",) and found.loss == pytest.approx(2.6)
    few = Sensitivity("gradient", 8, {site: {4: 1.0} for site in plain.scores})
    with pytest.raises(ConfigError, match=r"has 8 bits, and scores for 4 alone"):
        search_latency(qmodel, [BATCH], 0.45, scores=few, stopwatch=Fake(FAST))


def test_bytes_follow_the_bits_of_each_weight() -> None:
    assert _weight_bytes(["a", "b"], {"a": 100, "b": 16}, {"a": 4, "b": 8}) == (464.0, 66.0)
    assert _weight_bytes([], {}, {}) == (0, 0)


def test_limits_that_cannot_be_kept(qmodel: QuantModel) -> None:
    scores = scores_of(qmodel, {})
    with pytest.raises(BudgetError, match=r"latency limit 0.1: no placement .*\(all in integers: 0\.2\d\d"):
        search_latency(qmodel, [BATCH], 0.1, scores=scores, stopwatch=Fake(FAST))
    with pytest.raises(BudgetError):
        search_latency(qmodel, [BATCH], 0.5, max_bytes=0.2, scores=scores, stopwatch=Fake(FAST))


def test_limits_that_can_be_kept_are_found_beside_others(qmodel: QuantModel, caplog: pytest.LogCaptureFixture) -> None:
    scores = scores_of(qmodel, {})
    found = search_latency(qmodel, [BATCH], [0.1, 0.5], scores=scores, stopwatch=Fake(FAST))
    assert [one.limit for one in found] == [0.5]
    assert "left out: latency limit 0.1: no placement" in caplog.text


@pytest.mark.parametrize("limits", [0, -1.0, [0.5, 0.0], float("nan"), []], ids=str)
def test_limits_without_sense(qmodel: QuantModel, limits: float) -> None:
    with pytest.raises(ConfigError, match="share"):
        search_latency(qmodel, [BATCH], limits, stopwatch=Fake(FAST))


def test_a_backend_without_a_runtime_here() -> None:
    config = {"DEVICE": "cpu", "W": {"QUANTIZER": {"BIT": 8}}, "A": {"QUANTIZER": {"BIT": 8}}}
    other = sparsebit.quantize(Net().eval(), [BATCH], config)
    with pytest.raises(ConfigError, match=r"search_latency\(\) with BACKEND: virtual"):
        search_latency(other, [BATCH], 0.5)


def test_a_real_runtime_and_the_file_that_is_kept(qmodel: QuantModel, tmp_path: Path) -> None:
    """Whatever the times are: a limit that everything keeps, and the scores that are measured."""
    (found,) = search_latency(qmodel, [BATCH], 1e6, max_bytes=0.9)
    assert 0 < found.ratio < 1e6 and found.loss >= 0
    assert sensitivity(qmodel, [BATCH], weight_bits=()).scores.keys() <= set(qmodel.plan)
    profile = PlacementProfile.load(found.profile.save(tmp_path / "placement.json"))
    again = sparsebit.quantize(Net().eval(), [BATCH], "onnxruntime", placement=profile)
    assert set(again.plan) == set(found.qmodel.plan)
