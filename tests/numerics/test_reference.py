from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsebit.numerics.qparams import broadcast_to, dequantized_range, qparams_from_range
from sparsebit.numerics.reference import code_dtype, dequantize, fake_quantize, quantize
from sparsebit.numerics.spec import Granularity, PerChannel, PerGroup, PerTensor, TensorSpec, to_rows

GRANULARITIES = st.sampled_from([PerTensor(), PerChannel(0), PerChannel(-1), PerGroup(1, 3), PerGroup(0, 2)])
ANY_SPEC = st.builds(TensorSpec, st.integers(1, 16), st.booleans(), GRANULARITIES)


def data(
    seed: int, magnitude: int, spec: TensorSpec, clip: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A tensor of 5 x 7, and the scale and zero point of `clip` times its range."""
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(seed)) * 10.0**magnitude
    rows = to_rows(x, spec.granularity)
    return x, *qparams_from_range(rows.amin(1) * clip, rows.amax(1) * clip, spec)


def test_by_hand() -> None:
    x = torch.tensor([-10.0, -0.26, -0.25, 0.0, 0.25, 0.75, 1.24, 100.0])
    scale, zero_point = torch.tensor(0.5), torch.tensor(1.7)
    spec = TensorSpec(3, False)
    # ties go to even: -0.25/0.5 -> 0, 0.25/0.5 -> 0, 0.75/0.5 -> 2; the zero point rounds to 2
    codes = [0, 1, 2, 2, 2, 4, 4, 7]
    assert quantize(x, scale, zero_point, spec).tolist() == codes
    assert fake_quantize(x, scale, zero_point, spec).tolist() == [(code - 2) * 0.5 for code in codes]


@given(st.integers(0, 2**31), st.integers(-20, 20), ANY_SPEC)
def test_the_error_inside_the_range_is_half_a_step_at_most(seed: int, magnitude: int, spec: TensorSpec) -> None:
    x, scale, zero_point = data(seed, magnitude, spec, clip=0.7)
    low, high = (broadcast_to(end, x.shape, spec.granularity) for end in dequantized_range(scale, zero_point, spec))
    step = broadcast_to(scale, x.shape, spec.granularity)
    error = (fake_quantize(x, scale, zero_point, spec) - x).abs()
    inside = (x >= low) & (x <= high)
    # float32 itself is off by one part in 2^23 of x, which is num_levels steps away from zero at most
    assert (error <= step * (0.5 + spec.num_levels * 2.0**-22))[inside].all()


@given(st.integers(0, 2**31), st.integers(-20, 20), ANY_SPEC)
def test_quantizing_again_changes_nothing(seed: int, magnitude: int, spec: TensorSpec) -> None:
    x, scale, zero_point = data(seed, magnitude, spec, clip=0.8)
    once = fake_quantize(x, scale, zero_point, spec)
    assert torch.equal(fake_quantize(once, scale, zero_point, spec), once)


@given(st.integers(0, 2**31), st.integers(-20, 20), ANY_SPEC)
def test_zero_maps_to_zero(seed: int, magnitude: int, spec: TensorSpec) -> None:
    x, scale, zero_point = data(seed, magnitude, spec)
    assert fake_quantize(torch.zeros_like(x), scale, zero_point, spec).count_nonzero() == 0


@given(st.integers(0, 2**31), st.integers(-20, 20), ANY_SPEC)
def test_codes_stand_for_the_fake_quantized_values(seed: int, magnitude: int, spec: TensorSpec) -> None:
    x, scale, zero_point = data(seed, magnitude, spec, clip=0.8)
    codes = quantize(x, scale, zero_point, spec)
    assert codes.dtype == code_dtype(spec)
    assert spec.qmin <= codes.min() <= codes.max() <= spec.qmax
    assert torch.equal(dequantize(codes, scale, zero_point, spec), fake_quantize(x, scale, zero_point, spec))


@given(st.integers(0, 2**31), st.booleans(), st.floats(2.0**-10, 2.0**10, width=32), st.integers(0, 255))
def test_torch_agrees_per_tensor_away_from_ties(seed: int, symmetric: bool, scale: float, zero_point: int) -> None:
    spec = TensorSpec(8, symmetric)
    zero_point += spec.qmin
    x = _away_from_ties(seed, torch.tensor(scale))
    expected = torch.fake_quantize_per_tensor_affine(x, scale, zero_point, spec.qmin, spec.qmax)
    found = fake_quantize(x, torch.tensor(scale), torch.tensor(float(zero_point)), spec)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@given(st.integers(0, 2**31), st.booleans(), st.sampled_from([0, 1]))
def test_torch_agrees_per_channel_away_from_ties(seed: int, symmetric: bool, axis: int) -> None:
    spec = TensorSpec(8, symmetric, PerChannel(axis))
    generator = torch.Generator().manual_seed(seed)
    num_channels = (16, 12)[axis]
    scale = torch.rand(num_channels, generator=generator) + 0.01
    zero_point = torch.randint(spec.qmin, spec.qmax + 1, (num_channels,), generator=generator)
    x = _away_from_ties(seed, broadcast_to(scale, (16, 12), spec.granularity))
    expected = torch.fake_quantize_per_channel_affine(x, scale, zero_point.int(), axis, spec.qmin, spec.qmax)
    torch.testing.assert_close(fake_quantize(x, scale, zero_point.float(), spec), expected, rtol=1e-6, atol=0)


def _away_from_ties(seed: int, scale: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(-300, 301, (16, 12), generator=generator)
    return (whole + torch.rand(16, 12, generator=generator) * 0.9 - 0.45) * scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(0), PerGroup(1, 4)], ids=str)
def test_half_precision_computes_in_float32(dtype: torch.dtype, granularity: Granularity) -> None:
    spec = TensorSpec(8, False, granularity)
    x, scale, zero_point = data(0, 0, spec)
    y = fake_quantize(x.to(dtype), scale, zero_point, spec)
    assert y.dtype == dtype
    assert torch.equal(y, fake_quantize(x.to(dtype).float(), scale, zero_point, spec).to(dtype))


def test_nan_stays_nan_and_infinity_takes_the_last_code() -> None:
    x, one, zero = torch.tensor([math.nan, math.inf, -math.inf]), torch.tensor(1.0), torch.tensor(0.0)
    found = fake_quantize(x, one, zero, TensorSpec(4, True))
    torch.testing.assert_close(found, torch.tensor([math.nan, 7.0, -8.0]), equal_nan=True)
    assert quantize(x, one, zero + 3, TensorSpec(4, False)).tolist() == [3, 15, 0]


@pytest.mark.parametrize(
    ("bits", "symmetric", "dtype"),
    [(1, True, torch.int8), (8, False, torch.uint8), (9, True, torch.int16), (16, False, torch.int32)],
)
def test_code_types_hold_every_code(bits: int, symmetric: bool, dtype: torch.dtype) -> None:
    spec = TensorSpec(bits, symmetric)
    assert code_dtype(spec) == dtype
    assert torch.iinfo(dtype).min <= spec.qmin
    assert torch.iinfo(dtype).max >= spec.qmax
