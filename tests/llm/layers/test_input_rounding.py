"""Rounded inputs: the numbers of compressed-tensors, and products of whole numbers against the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparsebit.llm import QuantLinear
from sparsebit.llm.checkpoint.compressed_tensors import input_scheme
from sparsebit.llm.layers.input_kinds import SCHEMES, Activations
from sparsebit.llm.layers.input_rounding import InputRounding
from sparsebit.llm.layers.kernel_layouts import INTEGERS, LAYOUTS
from sparsebit.llm.layers.packed_weight import PackedWeight


def inputs(shape: tuple[int, ...] = (3, 7, 64)) -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(shape) * torch.logspace(-6, 3, shape[-1])
    x[0] = 0
    x[..., 3] = 1e-30
    return x


@pytest.mark.parametrize("name", SCHEMES)
def test_the_numbers_are_those_of_compressed_tensors(name: Activations) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    args: Any = QuantizationArgs(**input_scheme(SCHEMES[name]))
    x, module = inputs(), torch.nn.Module()
    constant = torch.tensor([3.7]) if name == "nvfp4" else None
    if args.dynamic:
        scale, zero = compute_dynamic_scales_and_zp(x, args, module, constant)
    else:
        scale, zero = torch.tensor([0.31]), torch.tensor([0])
    expected = fake_quantize(x, scale, zero, args, constant)
    found = InputRounding(SCHEMES[name], 3.7 if name == "nvfp4" else 0.31).rounded(x)
    assert torch.equal(found, expected)


def layer(rows: int = 24, columns: int = 64, name: Activations = "int8") -> QuantLinear:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (rows, columns), generator=generator).to(torch.uint8)
    scales = torch.rand(rows, 1, generator=generator) / 100
    return QuantLinear(PackedWeight.from_codes(codes, scales, None, 8), inputs=InputRounding(SCHEMES[name], 0.02))


def exact(part: QuantLinear, x: torch.Tensor) -> torch.Tensor:
    """Whole numbers in float64, in which their sums are exact."""
    assert part.inputs is not None
    codes, scale, _ = part.inputs.codes(x.float())
    whole = codes.double() @ (part.packed.codes().double() - 128).t()
    return whole * scale.double() * part.packed.scales.double().t()


@pytest.mark.parametrize("name", ["int8", "int8-static"])
@pytest.mark.parametrize("num_rows", [1, 40])
def test_products_of_whole_numbers(num_rows: int, name: Activations) -> None:
    part, x = layer(name=name), torch.randn(num_rows, 64)
    prepared = INTEGERS.prepare(part.packed, torch.float32)
    assert torch.equal(INTEGERS.codes(prepared), part.packed.codes())
    found = LAYOUTS["int_mm"].product(x, type(prepared)(**{**vars(prepared), "inputs": part.inputs}))
    assert torch.allclose(found.double(), exact(part, x), rtol=1e-6, atol=1e-9)
    assert torch.allclose(part(x).double(), exact(part, x), rtol=1e-4, atol=1e-5)  # the definition in float32


def test_which_weights_have_products_of_whole_numbers() -> None:
    assert INTEGERS.refusal(layer().packed, torch.float32) is None
    assert "multiples of 8" in str(INTEGERS.refusal(layer(columns=60).packed, torch.float32))
    assert "multiples of 8" in str(INTEGERS.refusal(layer(rows=20).packed, torch.float32))
    grouped = PackedWeight.from_codes(layer().packed.codes(), torch.ones(24, 2), None, 8)
    assert "groups of 32" in str(INTEGERS.refusal(grouped, torch.float32))
    zeros = torch.full((24, 1), 100, dtype=torch.uint8)
    assert "zero points" in str(
        INTEGERS.refusal(PackedWeight.from_codes(grouped.codes(), torch.ones(24, 1), zeros, 8), torch.float32)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["int8", "int8-static"])
@pytest.mark.parametrize("num_rows", [1, 16, 17, 300])
def test_on_a_gpu(num_rows: int, name: Activations, dtype: torch.dtype) -> None:
    part = layer(name=name)
    part.prepare(dtype)
    x = torch.randn(num_rows, 64).to(dtype)
    expected = exact(part, x)
    part.to("cuda")
    assert part.path == "int_mm"
    found = part(x.cuda())
    assert found.dtype == dtype
    tolerance = {"rtol": 1e-6, "atol": 1e-9} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 1e-6}
    assert torch.allclose(found.double().cpu(), expected, **tolerance)
    trained = x.cuda().requires_grad_()
    part(trained).sum().backward()
    assert trained.grad is not None
    assert part.to("cpu").path == "unpacked" and torch.equal(part.packed.codes(), layer().packed.codes())
