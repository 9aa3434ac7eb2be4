"""Packed weights and `QuantLinear`: the values of the codes, the same product, and bytes that stay small."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparsebit.errors import CheckpointError
from sparsebit.llm.layers import packed_weight as products
from sparsebit.llm.layers.packed_weight import PackedWeight, definition, packed_linear
from sparsebit.llm.layers.quant_linear import QuantLinear, resident_bytes


def packed_weight(bits: int = 4, symmetric: bool = False, group_size: int = 32, rows: int = 24) -> PackedWeight:
    codes = torch.randint(0, 1 << bits, (rows, 96))
    scales = torch.rand(rows, 96 // group_size).add_(0.1).half()
    zeros = None if symmetric else torch.randint(0, 1 << bits, scales.shape)
    return PackedWeight.from_codes(codes, scales, zeros, bits)


def test_a_known_weight() -> None:
    codes = torch.tensor([[0, 1, 2, 3]])
    packed = PackedWeight.from_codes(codes, torch.tensor([[0.5, 2.0]]), torch.tensor([[1, 3]]), 2)
    assert packed.dequantize(torch.float32).tolist() == [[-0.5, 0.0, -2.0, 0.0]]
    symmetric = PackedWeight.from_codes(codes, torch.tensor([[0.5]]), None, 2)
    assert symmetric.dequantize(torch.float32).tolist() == [[-1.0, -0.5, 0.0, 0.5]]
    assert (symmetric.group_size, symmetric.symmetric) == (4, True)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("shape", [(96,), (1, 96), (2, 5, 96)], ids=str)
def test_the_product_is_that_of_the_values(
    bits: int, symmetric: bool, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, bias, x = packed_weight(bits, symmetric), torch.randn(24), torch.randn(shape)
    expected = nn.functional.linear(x, packed.dequantize(torch.float32), bias)
    torch.testing.assert_close(packed_linear(x, packed, bias), expected, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(definition(x, packed, bias), expected, rtol=1e-4, atol=1e-2)
    monkeypatch.setattr(products, "_BLOCK_ELEMENTS", 7 * 96)  # blocks of 7 rows, the last of 3
    torch.testing.assert_close(QuantLinear(packed, bias)(x), expected, rtol=1e-4, atol=1e-2)


def test_tensors_of_a_file_and_back() -> None:
    for packed in (packed_weight(3), packed_weight(8, symmetric=True, group_size=96)):
        again = PackedWeight.from_tensors(packed.to_tensors("a.b"), "a.b")
        assert torch.equal(again.dequantize(torch.float64), packed.dequantize(torch.float64))
        assert (again.bits, again.group_size, again.symmetric) == (packed.bits, packed.group_size, packed.symmetric)


def test_bytes_and_bits() -> None:
    packed = packed_weight(4, group_size=32)
    assert packed.nbytes == 24 * 96 // 2 + 24 * 3 * 2 + 24 * 3
    assert packed.bits_per_weight == 4 + (16 + 4) / 32
    assert resident_bytes(QuantLinear(packed)) == packed.nbytes


def test_parts_that_do_not_belong_together() -> None:
    packed = packed_weight()
    with pytest.raises(CheckpointError, match="do not belong together"):
        PackedWeight(packed.qweight, packed.scales[:, :2], packed.zeros, 4, 32, 96)


def test_its_description() -> None:
    assert "96, 24, bits=4, group_size=32, asymmetric" in repr(QuantLinear(packed_weight()))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_the_gradient_is_that_of_the_values(bits: int, symmetric: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_BLOCK_ELEMENTS", 7 * 96)
    packed, bias, upstream = packed_weight(bits, symmetric), torch.randn(24), torch.randn(2, 20, 24)
    x = torch.randn(2, 20, 96, requires_grad=True)
    expected = nn.functional.linear(x, packed.dequantize(torch.float32), bias)
    (wanted,) = torch.autograd.grad(expected, x, upstream)
    found = QuantLinear(packed, bias)(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-2)
    (gradient,) = torch.autograd.grad(found, x, upstream)
    torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-2)


def test_no_dense_weight_is_kept_for_the_backward() -> None:
    kept: list[torch.Size] = []
    x = torch.randn(3, 96, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.shape), t)[1], lambda t: t):
        QuantLinear(packed_weight())(x).sum().backward()
    assert kept == [] and x.grad is not None


def test_kernels_that_round_are_not_trained_with() -> None:
    packed = packed_weight(4, rows=32)
    layer, plain = QuantLinear(packed), QuantLinear(packed)
    layer.prepare(activations="bfloat16")
    x = torch.randn(5, 96, requires_grad=True)
    found, expected = layer(x), plain(x)
    torch.testing.assert_close(found, expected)
    (gradient,), (wanted,) = (torch.autograd.grad(y.sum(), x) for y in (found, expected))
    torch.testing.assert_close(gradient, wanted)
