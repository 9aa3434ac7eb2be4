from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsebit.errors import BackendError, CalibrationError, SpecError
from sparsebit.numerics.qparams import (
    SMALLEST_SCALE,
    broadcast_to,
    check_backend,
    check_num_params,
    checked_qparams,
    dequantized_range,
    qparams_from_range,
)
from sparsebit.numerics.spec import Granularity, PerChannel, PerGroup, PerTensor, TensorSpec, to_rows

INT8, UINT8 = TensorSpec(8, True), TensorSpec(8, False)
FLOATS = st.floats(-(2.0**100), 2.0**100, width=32)


def _qparams(low: float, high: float, spec: TensorSpec) -> tuple[float, float]:
    scale, zero_point = qparams_from_range(torch.tensor(low), torch.tensor(high), spec)
    assert scale.dtype == zero_point.dtype == torch.float32
    return scale.item(), zero_point.item()


@pytest.mark.parametrize(
    ("low", "high", "spec", "expected"),
    [
        pytest.param(-1.28, 1.0, INT8, (0.01, 0), id="symmetric-negative-end-decides"),
        pytest.param(-1.0, 1.27, INT8, (0.01, 0), id="symmetric-positive-end-decides"),
        pytest.param(-0.5, 2.05, UINT8, (0.01, 50), id="affine"),
        pytest.param(0.3, 2.55, UINT8, (0.01, 0), id="affine-positive-range-takes-zero-in"),
        pytest.param(-2.55, -0.3, UINT8, (0.01, 255), id="affine-negative-range-takes-zero-in"),
        pytest.param(0.0, 0.0, INT8, (1.0, 0), id="symmetric-empty"),
        pytest.param(0.0, 0.0, UINT8, (1.0, 0), id="affine-empty"),
        pytest.param(-3.0, 2.0, TensorSpec(1, True), (3.0, 0), id="one-symmetric-bit"),
        pytest.param(0.0, 2.0, TensorSpec(1, True), (2.0, 0), id="one-symmetric-bit-of-positive-data"),
        pytest.param(-1.0, 2.0, TensorSpec(1, False), (3.0, 0), id="one-affine-bit"),
    ],
)
def test_analytic_cases(low: float, high: float, spec: TensorSpec, expected: tuple[float, float]) -> None:
    assert _qparams(low, high, spec) == pytest.approx(expected)


@given(FLOATS, FLOATS, st.integers(2, 16), st.booleans())
def test_the_grid_holds_the_range_and_zero(a: float, b: float, bits: int, symmetric: bool) -> None:
    spec = TensorSpec(bits, symmetric)
    low, high = min(a, b, 0.0), max(a, b, 0.0)
    scale, zero_point = qparams_from_range(torch.tensor(min(a, b)), torch.tensor(max(a, b)), spec)
    assert scale >= SMALLEST_SCALE
    assert zero_point == zero_point.round()
    assert spec.qmin <= zero_point <= spec.qmax
    bottom, top = (end.double() for end in dequantized_range(scale, zero_point, spec))
    slack = scale.double() * (0.5 + 1e-6 * spec.num_levels)
    assert bottom <= low + slack
    assert top >= high - slack


@pytest.mark.parametrize("spec", [INT8, UINT8], ids=["int8", "uint8"])
@pytest.mark.parametrize("size", [1e-45, 1e-42, 1e-38, 3.4e38], ids=str)
def test_scales_are_normal_numbers_at_both_ends_of_float32(size: float, spec: TensorSpec) -> None:
    scale, _ = _qparams(-size, size, spec)
    assert SMALLEST_SCALE <= scale < math.inf


def test_each_row_has_its_own_numbers() -> None:
    low, high = torch.tensor([-1.0, 0.0, -2.0]), torch.tensor([1.0, 0.0, 4.0])
    scale, zero_point = qparams_from_range(low, high, UINT8)
    for row in range(3):
        assert (scale[row].item(), zero_point[row].item()) == _qparams(low[row].item(), high[row].item(), UINT8)


@pytest.mark.parametrize(("low", "high"), [(math.nan, 1.0), (-1.0, math.inf), (-math.inf, 0.0), (1.0, -1.0)], ids=str)
def test_ranges_that_are_none_are_refused(low: float, high: float) -> None:
    with pytest.raises(CalibrationError, match=r"in 1 of 2 rows: both ends must be finite and in order"):
        qparams_from_range(torch.tensor([-1.0, low]), torch.tensor([1.0, high]), INT8)


def test_ends_of_different_shapes_are_refused() -> None:
    with pytest.raises(SpecError, match=r"shapes \(2,\) and \(\)"):
        qparams_from_range(torch.zeros(2), torch.tensor(1.0), INT8)


@pytest.mark.parametrize(
    ("granularity", "shape"),
    [(PerTensor(), ()), (PerChannel(1), (1, 6, 1)), (PerChannel(-1), (1, 1, 5)), (PerGroup(1, 4), (4, 6, 5))],
    ids=str,
)
def test_parameters_meet_the_tensor_they_were_made_of(granularity: Granularity, shape: tuple[int, ...]) -> None:
    x = torch.randn(4, 6, 5)
    largest = to_rows(x.abs(), granularity).amax(1)
    aligned = broadcast_to(largest, x.shape, granularity)
    assert aligned.shape == shape
    assert (x.abs() <= aligned).all()
    assert int((x.abs() == aligned).sum()) == largest.numel()


@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(0), PerGroup(1, 4)], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1, 1)], ids=str)
def test_one_number_meets_anything(granularity: Granularity, shape: tuple[int, ...]) -> None:
    assert broadcast_to(torch.ones(shape), (4, 6), granularity).shape == ()


@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(0), PerGroup(1, 4)], ids=str)
def test_a_wrong_number_of_parameters_is_refused(granularity: Granularity) -> None:
    with pytest.raises(SpecError, match=r"5 scales or zero points for a tensor of shape \(4, 6\) with Per.*allowed: 1"):
        broadcast_to(torch.ones(5), (4, 6), granularity)
    with pytest.raises(SpecError, match="2 scales or zero points"):
        check_num_params(2, (3, 9), granularity)
    check_num_params(1, (3, 9), granularity)


def test_dequantized_range_rounds_the_zero_point() -> None:
    low, high = dequantized_range(torch.tensor(0.5), torch.tensor(9.6), TensorSpec(4, False))
    assert (low.item(), high.item()) == (-5.0, 2.5)


ZERO, THREE = torch.tensor(0.0), torch.tensor(3.0)
WEIGHT = TensorSpec(8, True, PerChannel(0))


@pytest.mark.parametrize(
    ("spec", "zero_point", "backend"),
    [
        (TensorSpec(3, False, PerGroup(1, 32)), torch.tensor(-40.0), "virtual"),
        (UINT8, THREE, "onnxruntime"),
        (WEIGHT, torch.zeros(4), "tensorrt"),
        (INT8, ZERO, "tensorrt"),
        (TensorSpec(4, True, PerGroup(1, 32)), ZERO, "onnxruntime"),
    ],
)
def test_backends_take_what_they_run(spec: TensorSpec, zero_point: torch.Tensor, backend: str) -> None:
    check_backend(spec, zero_point, backend, "layer1.conv")


@pytest.mark.parametrize(
    ("spec", "zero_point", "backend", "message"),
    [
        (UINT8, THREE, "tensorrt", "8-bit per-tensor-affine at layer1.conv: tensorrt runs 8-bit per-channel-sym"),
        (INT8, THREE, "tensorrt", "zero point 3.0 at layer1.conv: tensorrt stores int8 with zero points from 0 to 0"),
        (WEIGHT, torch.tensor([0.0, -1.0]), "tensorrt", "zero point -1.0 at layer1.conv"),
        (UINT8, torch.tensor(-2.0), "onnxruntime", "stores uint8 with zero points from 0 to 255; clamp the learned"),
        (UINT8.replace(granularity=PerChannel(1)), ZERO, "tensorrt", "8-bit per-channel-affine at layer1.conv"),
        (TensorSpec(5, True), ZERO, "openvino", "5-bit per-tensor-symmetric at layer1.conv"),
        (INT8, ZERO, "tensorflow", "backend 'tensorflow' at layer1.conv: allowed: virtual, onnxruntime"),
    ],
)
def test_backends_refuse_the_rest_by_site(
    spec: TensorSpec, zero_point: torch.Tensor, backend: str, message: str
) -> None:
    with pytest.raises(BackendError, match=message):
        check_backend(spec, zero_point, backend, "layer1.conv")


def test_given_numbers_have_one_for_each_scale() -> None:
    one, three = torch.tensor(0.5), torch.ones(3)
    assert [tuple(number.shape) for number in checked_qparams(one, ZERO, UINT8, 1, "x")] == [(), ()]
    assert [tuple(number.shape) for number in checked_qparams(three, ZERO, WEIGHT, None, "x")] == [(3,), (3,)]
    assert checked_qparams(one, ZERO, WEIGHT, 2, "x")[0].tolist() == [0.5, 0.5]
    with pytest.raises(SpecError, match=r"x: 3 scales or zero points with PerChannel.*; allowed: 1 or 2"):
        checked_qparams(three, ZERO, WEIGHT, 2, "x")
    with pytest.raises(CalibrationError, match=r"zero point -1\.\.3 with uint8; allowed: .* zero points 0 to 255"):
        checked_qparams(one, torch.tensor([-1.0, 3.0]), UINT8, 2, "x")
