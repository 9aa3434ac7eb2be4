from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsebit.errors import SpecError
from sparsebit.numerics import plain, reference
from sparsebit.numerics.qparams import qparams_from_range
from sparsebit.numerics.spec import Granularity, PerChannel, PerGroup, PerTensor, TensorSpec, to_rows

GRANULARITIES = [
    PerTensor(), PerChannel(0), PerChannel(1), PerChannel(-1), PerGroup(1, 3), PerGroup(-1, 4), PerGroup(0, 8),
]  # fmt: skip
LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 3),
    "sliced": lambda x: x[:, ::2],
    "expanded": lambda x: x[:, :1].expand(-1, 6, -1, -1),
}


def fake_quantize(x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    granularity = spec.granularity
    return plain.fake_quantize(x, scale, zero_point, granularity.axis, granularity.size, spec.qmin, spec.qmax)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_equal_to_the_reference_bit_by_bit(granularity: Granularity, layout: str, dtype: torch.dtype) -> None:
    x = LAYOUTS[layout](torch.randn(4, 6, 5, 8)).to(dtype)
    rows = to_rows(x, granularity)
    before = x.clone()
    for spec in (TensorSpec(8, True, granularity), TensorSpec(3, False, granularity)):
        scale, zero_point = qparams_from_range(rows.amin(1) * 0.7, rows.amax(1) * 0.7, spec)
        y = fake_quantize(x, scale, zero_point, spec)
        assert torch.equal(y, reference.fake_quantize(x, scale, zero_point, spec))
        assert (y.dtype, y.stride()) == (dtype, torch.empty_like(x).stride())
    assert torch.equal(x, before)


@given(
    st.integers(0, 2**31),
    st.integers(1, 16),
    st.booleans(),
    st.floats(2.0**-100, 2.0**100, width=32),
    st.floats(-70000, 70000),
)
def test_equal_to_the_reference_for_any_numbers(
    seed: int, bits: int, symmetric: bool, scale: float, zero_point: float
) -> None:
    # learned zero points are neither whole nor inside the codes, and data lies far outside the range
    spec = TensorSpec(bits, symmetric)
    x = torch.randn(64, generator=torch.Generator().manual_seed(seed)) * scale * 2**bits
    params = torch.tensor(scale), torch.tensor(zero_point)
    assert torch.equal(fake_quantize(x, *params, spec), reference.fake_quantize(x, *params, spec))


@pytest.mark.parametrize("zero_point", [0.0, 2.5, math.nan, math.inf], ids=str)
@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(0)], ids=str)
def test_numbers_that_are_none_come_out_as_in_the_reference(zero_point: float, granularity: Granularity) -> None:
    x = torch.tensor([[math.nan, math.inf], [-math.inf, 1.0]])
    params = torch.full((2 if granularity.axis == 0 else 1,), 0.5), torch.tensor(zero_point)
    spec = TensorSpec(4, False, granularity)
    expected = reference.fake_quantize(x, *params, spec)
    torch.testing.assert_close(fake_quantize(x, *params, spec), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(), (1,), (0, 3)], ids=str)
def test_scalars_and_empty_tensors_keep_their_shape(shape: tuple[int, ...]) -> None:
    assert fake_quantize(torch.zeros(shape), torch.ones(1), torch.zeros(1), TensorSpec(8, True)).shape == shape


@pytest.mark.parametrize("granularity", [PerChannel(0), PerGroup(1, 4)], ids=str)
def test_one_scale_serves_any_granularity(granularity: Granularity) -> None:
    x, one, zeros = torch.randn(4, 8), torch.tensor([0.1]), torch.zeros(4 if granularity.size == 0 else 8)
    expected = reference.fake_quantize(x, one, zeros[0], TensorSpec(4, True))
    assert torch.equal(fake_quantize(x, one, zeros, TensorSpec(4, True, granularity)), expected)


@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(0), PerGroup(1, 4)], ids=str)
def test_a_wrong_number_of_scales_is_refused(granularity: Granularity) -> None:
    with pytest.raises(SpecError, match=r"5 scales or zero points for a tensor of shape \(4, 8\)"):
        fake_quantize(torch.zeros(4, 8), torch.ones(5), torch.zeros(()), TensorSpec(8, True, granularity))


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gpu_gives_the_numbers_of_a_cpu(granularity: Granularity, dtype: torch.dtype) -> None:
    x = torch.randn(4, 6, 5, 8).to(dtype)
    rows = to_rows(x, granularity)
    spec = TensorSpec(8, False, granularity)
    scale, zero_point = qparams_from_range(rows.amin(1) * 0.7, rows.amax(1) * 0.7, spec)
    found = fake_quantize(x.cuda(), scale.cuda(), zero_point.cuda(), spec)
    assert torch.equal(found.cpu(), fake_quantize(x, scale, zero_point, spec))


def test_a_parameter_comes_to_the_device_of_the_values() -> None:
    assert plain.align(torch.ones(3), torch.empty(2, 3, device="meta"), 1, 0).device.type == "meta"
