"""4-bit floats: all 16 numbers, nearest with halves to even, and two in a byte."""

from __future__ import annotations

import pytest
import torch

from sparsebit.numerics.float4 import MAGNITUDES, float4_codes, float4_values, pack_float4, unpack_float4


def test_every_number_is_its_own_code() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    values = float4_values(codes, torch.float32)
    assert values[:8].tolist() == list(MAGNITUDES)
    assert torch.equal(float4_codes(values)[:8], codes[:8])
    assert torch.equal(float4_values(float4_codes(values), torch.float32), values)


def test_the_nearest_is_taken() -> None:
    x = torch.linspace(-8, 8, 4001)
    table = float4_values(torch.arange(16, dtype=torch.uint8), torch.float32)
    found = float4_values(float4_codes(x), torch.float32)
    least = (x[:, None] - table).abs().amin(1)
    torch.testing.assert_close((x - found).abs(), least)


def test_halves_go_to_even_codes() -> None:
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.75, -5.0])
    found = float4_values(float4_codes(halves), torch.float32)
    assert found.tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -1.0, -4.0]


def test_two_share_a_byte() -> None:
    codes = torch.randint(0, 16, (5, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    packed = pack_float4(codes)
    assert packed.shape == (5, 6) and int(packed[0, 0]) == int(codes[0, 0]) + 16 * int(codes[0, 1])
    assert torch.equal(unpack_float4(packed), codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_values_of_all_codes(dtype: torch.dtype) -> None:
    expected = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)], dtype=dtype)
    found = float4_values(torch.arange(16, dtype=torch.uint8), dtype)
    assert found.dtype == dtype and torch.equal(found, expected)
    assert torch.equal(found.signbit(), expected.signbit())  # of the zeros too
    assert torch.equal(float4_codes(found), torch.arange(16, dtype=torch.uint8))
