"""Packing: a known answer, the round trip, the layout of other tools, and refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsebit.errors import SpecError
from sparsebit.numerics.packing import num_words, pack, unpack


@given(bits=st.integers(1, 8), count=st.integers(1, 100), rows=st.integers(1, 3), seed=st.integers(0, 9))
def test_round_trip(bits: int, count: int, rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (rows, count), generator=generator, dtype=torch.uint8)
    words = pack(codes, bits)
    assert words.dtype == torch.int32 and words.shape == (rows, num_words(count, bits))
    assert torch.equal(unpack(words, bits, count), codes)


def test_is_dense_and_begins_at_the_lowest_bit() -> None:
    codes = torch.zeros(1, 32, dtype=torch.int64)
    codes[0, 10] = 0b101  # bits 30, 31 of word 0 and bit 0 of word 1
    words = pack(codes, 3)
    assert words.tolist() == [[1 << 30, 1, 0]]


def test_the_largest_codes_fill_every_bit() -> None:
    for bits in range(1, 9):
        words = pack(torch.full((2, 64), (1 << bits) - 1), bits)
        assert (words == -1).all(), bits
        assert (unpack(words, bits, 64) == (1 << bits) - 1).all()


@pytest.mark.parametrize("bits", range(1, 9))
def test_is_the_layout_of_compressed_tensors(bits: int) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = torch.randint(0, 1 << bits, (5, 48))
    theirs = helpers.pack_to_int32((codes - (1 << bits - 1)).to(torch.int8), bits)
    assert torch.equal(pack(codes, bits), theirs)


def test_more_dimensions() -> None:
    codes = torch.randint(0, 8, (2, 3, 40))
    assert torch.equal(unpack(pack(codes, 3), 3, 40).long(), codes)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_nothing_is_packed_as_nothing(shape: tuple[int, int], bits: int) -> None:
    words = pack(torch.zeros(shape, dtype=torch.uint8), bits)
    assert words.shape == (shape[0], num_words(shape[1], bits))
    assert unpack(words, bits, shape[1]).shape == shape


@pytest.mark.parametrize("code", [-1, 16])
def test_refuses_codes_outside(code: int) -> None:
    with pytest.raises(SpecError, match="in 4 bits: allowed"):
        pack(torch.tensor([[code]]), 4)


def test_refuses_other_widths_and_shapes() -> None:
    with pytest.raises(SpecError, match="allowed: 1 to 8"):
        pack(torch.zeros(1, 8, dtype=torch.int32), 9)
    with pytest.raises(SpecError, match="3 words of int32"):
        unpack(torch.zeros(1, 4, dtype=torch.int32), 3, 32)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_transposed_codes(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (64, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(pack(codes.mT, bits), pack(codes.mT.contiguous(), bits))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_transposed_words_of_one_column(bits: int) -> None:
    codes = torch.tensor([[1, 2], [3, 0], [2, 2]])
    words = pack(codes, bits)
    assert torch.equal(unpack(words.mT.contiguous().mT, bits, 2), codes.to(torch.uint8))
