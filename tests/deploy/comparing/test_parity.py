from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from sparsebit.deploy.comparing.parity import Comparison, OutputParity, Parity, Tolerance, decibels
from sparsebit.errors import DeploymentError

SCORES = np.random.default_rng(0).normal(size=(50, 10)).astype(np.float32)


def compare(expected: Any, found: Any, reference: Any = None, **settings: Any) -> Parity:
    comparison = Comparison(["scores"], **settings)
    comparison.add([expected], [found], None if reference is None else [reference])
    return comparison.result("m.onnx", "onnxruntime", "the simulation")


def test_equal_outputs_are_exact() -> None:
    parity = compare(SCORES, SCORES.copy())
    assert parity.is_exact and parity.worst.sqnr_db == math.inf and parity.worst.top1 == 1.0
    assert parity.fault(Tolerance(max_difference=0.0)) == ""
    assert str(parity) == "bit-exact in onnxruntime against the simulation, on 50 samples"


def test_differences_are_shares_of_the_range() -> None:
    expected = np.array([[0.0, 10.0], [2.0, 4.0]], np.float32)
    output = compare(expected, expected + np.array([[0.0, 0.5], [0.0, 0.0]], np.float32)).worst
    assert output.max_difference == pytest.approx(0.05)
    assert output.mean_difference == pytest.approx(0.0125)
    assert output.sqnr_db == pytest.approx(10 * math.log10(120 / 0.25))


def test_batches_add_up() -> None:
    whole = compare(SCORES, SCORES + 0.01).worst
    comparison = Comparison(["scores"])
    for start in (0, 20):
        part = SCORES[start : start + 20 + start // 2]
        comparison.add([part], [part + 0.01])
    parts = comparison.result("", "", "").worst
    assert parts.num_samples == whole.num_samples == 50
    assert parts.sqnr_db == pytest.approx(whole.sqnr_db) and parts.max_difference == pytest.approx(whole.max_difference)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_a_fault(value: float) -> None:
    found = SCORES.copy()
    found[3, 4] = value
    parity = compare(SCORES, found)
    assert not parity.is_exact
    words = "output scores: 1 values are NaN or infinite in the file or in the simulation, not in both"
    assert parity.fault(Tolerance()) == parity.fault(Tolerance(allow_nan=True)) == words
    swapped = compare(found, SCORES)
    assert not swapped.is_exact and swapped.fault(Tolerance()) == words


@pytest.mark.parametrize(("one", "other"), [(np.nan, np.inf), (np.inf, -np.inf), (-np.inf, np.nan)])
def test_different_kinds_of_no_number_are_a_fault(one: float, other: float) -> None:
    expected, found = SCORES.copy(), SCORES.copy()
    expected[3, 4], found[3, 4] = one, other
    assert "not in both" in compare(expected, found).fault(Tolerance(sqnr_db=-99, top1=0, allow_nan=True))


def test_nan_on_both_sides_is_told_and_by_default_a_fault() -> None:
    both = SCORES.copy()
    both[3, 4] = np.nan
    parity = compare(both, both.copy())
    assert not parity.is_exact and "1 values NaN in both" in str(parity) and "bit-exact" not in str(parity)
    assert "1 values are NaN, in the simulation too" in parity.fault(Tolerance())
    assert parity.fault(Tolerance(allow_nan=True, exact=True)) == ""
    assert "NaN" in compare(np.full_like(both, np.nan), np.full_like(both, np.nan)).fault(Tolerance())


def test_infinite_on_both_sides_is_equal() -> None:
    both = SCORES.copy()
    both[5, 6] = -np.inf
    parity = compare(both, both.copy())
    assert parity.is_exact and parity.fault(Tolerance(exact=True)) == ""


def test_limits_that_the_user_sets() -> None:
    floats = SCORES + 0.2 * np.random.default_rng(1).normal(size=SCORES.shape).astype(np.float32)
    parity = compare(SCORES, SCORES + np.float32(1e-3), floats)
    assert parity.fault(Tolerance()) == parity.fault(Tolerance(min_sqnr_db=40)) == ""
    assert "80.0 dB is required" in parity.fault(Tolerance(min_sqnr_db=80))
    assert "bit by bit" in parity.fault(Tolerance(exact=True))
    assert compare(SCORES, SCORES.copy()).fault(Tolerance(exact=True, min_sqnr_db=200)) == ""


def test_sqnr_below_the_limit_is_a_fault() -> None:
    noise = np.random.default_rng(1).normal(size=SCORES.shape).astype(np.float32)
    assert "SQNR 20.0 dB against the simulation; 35.0 dB is needed" in compare(
        SCORES, SCORES + 0.1 * noise * np.float32(np.linalg.norm(SCORES) / np.linalg.norm(noise))
    ).fault(Tolerance(top1=0.0))


def test_drift_may_be_as_large_as_the_noise_of_quantization() -> None:
    noise, drift = (np.random.default_rng(seed).normal(size=SCORES.shape).astype(np.float32) for seed in (1, 2))
    floats = SCORES + 0.2 * noise
    assert compare(SCORES, SCORES + 0.2 * drift, floats).fault(Tolerance(top1=0.0)) == ""
    assert "SQNR" in compare(SCORES, SCORES + 0.5 * drift, floats).fault(Tolerance(top1=0.0))


def test_top1_counts_where_the_drift_cannot_decide() -> None:
    expected = np.array([[0.0, 1.0, 5.0], [0.0, 1.0, 1.001]], np.float32)
    found = expected + 0.002 * np.array([[1, -1, 1], [-1, 1, -1]], np.float32)  # the second one was a tie
    assert compare(expected, found).worst.top1 == 1.0
    assert compare(expected, found, judge_all=True).worst.top1 == 0.5
    wrong = SCORES.copy()
    wrong[0] = wrong[0, ::-1]
    assert compare(SCORES, wrong).fault(Tolerance(sqnr_db=-99)) == ""  # one sample is never enough to judge
    wrong[1] = wrong[1, ::-1]
    assert "top-1 agrees on 96.0% of the samples" in compare(SCORES, wrong).fault(Tolerance(sqnr_db=-99))


def test_a_limit_of_its_own_for_the_largest_difference() -> None:
    parity = compare(SCORES, SCORES + 1e-3)
    assert parity.fault(Tolerance()) == ""
    assert "of its range; 1e-05 is allowed" in parity.fault(Tolerance(max_difference=1e-5))


def test_whole_numbers_are_right_or_wrong() -> None:
    expected = np.arange(200)
    found = expected.copy()
    found[7] = 10**9
    output = compare(expected, found).worst
    assert output.top1 == pytest.approx(0.995) and output.sqnr_db == math.inf
    assert output.fault(Tolerance()) == "" and not output.is_exact
    assert "agrees on 50.0%" in compare(expected > 99, expected > 300).fault(Tolerance())


@pytest.mark.parametrize("shape", [(), (0, 3), (4,), (2, 3, 4)], ids=str)
def test_outputs_of_any_shape(shape: tuple[int, ...]) -> None:
    comparison = Comparison(["a", "b"])
    comparison.add([np.ones(shape, np.float32), SCORES], [np.ones(shape, np.float32), SCORES])
    parity = comparison.result("", "", "")
    assert [output.name for output in parity.outputs] == (["b"] if 0 in shape else ["a", "b"])
    assert all(output.top1 is None for output in parity.outputs if output.name == "a")


def test_shapes_and_counts_that_differ_are_refused() -> None:
    with pytest.raises(DeploymentError, match=r"output scores: shape \(50, 9\) in the file, not \(50, 10\)"):
        compare(SCORES, SCORES[:, :9])
    with pytest.raises(DeploymentError, match=r"the file has 2 outputs \(scores\), the model 1"):
        Comparison(["scores"]).add([SCORES], [SCORES, SCORES])


def test_nothing_compared_is_no_success() -> None:
    with pytest.raises(DeploymentError, match="nothing was compared"):
        Comparison(["scores"]).result("", "", "")


def test_the_record_goes_to_json() -> None:
    record = json.loads(json.dumps(compare(SCORES, SCORES + 1e-3).to_dict()))
    assert record["runtime"] == "onnxruntime" and record["is_exact"] is False
    assert OutputParity(**record["outputs"][0]).name == "scores"


def test_decibels_at_the_ends() -> None:
    assert decibels(1.0, 0.0) == math.inf
    assert decibels(0.0, 1.0) == decibels(1.0, math.inf) == -math.inf
    assert decibels(100.0, 1.0) == pytest.approx(20.0)
