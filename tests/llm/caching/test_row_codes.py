"""Rows of bytes: sizes, exact values, the bound of the error, and odd numbers."""

from __future__ import annotations

import pytest
import torch

from sparsebit.errors import ConfigError
from sparsebit.llm.caching.cache_kinds import CACHE_KINDS, CacheKind
from sparsebit.llm.caching.row_codes import RowCodes, block_of


def numbers(width: int = 64, heads: int = 4) -> torch.Tensor:
    return torch.randn(2, heads, 10, width, generator=torch.Generator().manual_seed(0))


def codes_for(kind: CacheKind, x: torch.Tensor) -> RowCodes:
    largest = x.abs().amax((0, 2, 3)).reshape(-1, 1, 1)
    return RowCodes(kind, {"int8": largest / 127, "fp8": largest / 448, "int4": None}[kind])


@pytest.mark.parametrize(("kind", "num_bytes"), [("int8", 64), ("fp8", 64), ("int4", 36)])
def test_bytes_of_a_row(kind: CacheKind, num_bytes: int) -> None:
    x = numbers()
    rows = codes_for(kind, x).pack(x)
    assert rows.dtype == torch.uint8 and rows.shape == (2, 4, 10, num_bytes)  # 0.5, 0.5, 0.28 of 16 bits


@pytest.mark.parametrize("width", [8, 16, 24, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_the_error_is_bounded(kind: CacheKind, width: int) -> None:
    x = numbers(width)
    codes = codes_for(kind, x)
    error = (codes.unpack(codes.pack(x), width, torch.float32) - x).abs()
    if kind == "int8":
        assert bool((error <= 0.501 * codes.scale).all())
    elif kind == "fp8":
        assert bool((error <= x.abs() / 16 + codes.scale / 512).all())
    else:  # the root mean square of a block of 32 normal numbers
        assert 0.02 < float(error.square().mean().sqrt()) < 0.14


def test_int8_by_hand() -> None:
    codes = RowCodes("int8", torch.tensor([[[0.5]], [[2.0]]]))
    x = torch.tensor([[[[1.0, -1.26, 100.0, -100.0]], [[1.0, 3.0, 5.0, -300.0]]]])
    expected = torch.tensor([[[[1.0, -1.5, 63.5, -64.0]], [[0.0, 4.0, 4.0, -256.0]]]])  # half to even, -128 to 127
    assert torch.equal(codes.unpack(codes.pack(x), 4, torch.float32), expected)


def test_fp8_saturates() -> None:
    codes = RowCodes("fp8", torch.ones(1))
    x = torch.tensor([[[[1e6, -1e6, 0.0, 1.0]]]])
    assert torch.equal(codes.unpack(codes.pack(x), 4, torch.float32), torch.tensor([[[[448.0, -448.0, 0.0, 1.0]]]]))


@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_zeros_stay_zero(kind: CacheKind) -> None:
    codes = RowCodes(kind, None if kind == "int4" else torch.ones(1))
    rows = codes.pack(torch.zeros(1, 2, 3, 32))
    assert not codes.unpack(rows, 32, torch.float16).any()
    if kind != "int4":  # rows that a cache of fixed size has not written yet
        assert not codes.unpack(torch.zeros_like(rows), 32, torch.float32).any()
    assert not RowCodes("int4").unpack(torch.zeros(1, 2, 3, 18, dtype=torch.uint8), 32, torch.float32).any()


def test_a_large_channel_does_not_hide_the_others() -> None:
    """Without the rotation all other numbers of its block would be rounded to zero."""
    x = numbers(64)
    x[..., 5] = 30.0
    found = RowCodes("int4").unpack(RowCodes("int4").pack(x), 64, torch.float32)
    rest = [channel for channel in range(64) if channel != 5]
    assert float((found - x)[..., rest].square().mean() / x[..., rest].square().mean()) < 0.2


def test_tokens_are_packed_alone() -> None:
    x = numbers()
    for kind in CACHE_KINDS:
        codes = codes_for(kind, x)
        parts = [codes.pack(part) for part in x.split(3, dim=2)]
        assert torch.equal(torch.cat(parts, 2), codes.pack(x)), kind


def test_nan_and_infinity_are_not_hidden() -> None:
    x = numbers(32)
    x[0, 0, 0, 3] = torch.nan
    found = RowCodes("int4").unpack(RowCodes("int4").pack(x), 32, torch.float32)
    assert found[0, 0, 0].isnan().any() and found[1:].isfinite().all()


def test_every_float8_number() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).float()
    found = RowCodes("fp8", torch.full((1,), 0.25)).unpack(codes, 256, torch.float32)
    is_number = ~expected.isnan()
    assert int(is_number.sum()) == 254 and torch.equal(found[is_number], expected[is_number] * 0.25)


def test_blocks() -> None:
    assert [block_of(width) for width in (8, 16, 64, 80, 96, 128)] == [8, 16, 32, 16, 32, 32]
    with pytest.raises(ConfigError, match="heads of 20 numbers: allowed: multiples of 8"):
        block_of(20)
