"""Codes of 8 bits and scaled sums: the kernels against plain torch, interpreted on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from sparsebit.llm.layers.input_kinds import SCHEMES, Activations
from sparsebit.llm.layers.input_rounding import InputRounding


@pytest.fixture
def kernels(load_kernels: Callable[[str], ModuleType]) -> ModuleType:
    return load_kernels("eight_bits")


def inputs(device: str, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(rows, columns)
    x[0] = 0
    x[-1, -1] = 40
    return x.to(dtype).to(device)


@pytest.mark.parametrize("name", ["int8", "int8-static", "fp8", "fp8-static"])
@pytest.mark.parametrize(("rows", "columns"), [(3, 64), (2, 100), (2, 5000)])
def test_the_codes_are_those_of_plain_torch(
    kernels: ModuleType, device: str, name: Activations, rows: int, columns: int
) -> None:
    if device == "cpu" and name.startswith("fp8"):
        pytest.skip("triton's interpreter rounds float8 in another way")
    x, rounding = inputs(device, rows, columns), InputRounding(SCHEMES[name], 0.01)
    half = 127.5 if name.startswith("int8") else 448.0
    codes, scale = kernels.rounded(x, half, None if SCHEMES[name].dynamic else 0.01)
    wanted, wanted_scale, _ = rounding.codes(x.cpu())
    assert torch.equal(codes.cpu().float(), wanted.float())
    assert torch.equal(scale.cpu(), wanted_scale.expand(rows, 1)) and scale.shape == (rows, 1)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("constant", [None, 0.1])
def test_numbers_that_are_not_finite_show(
    kernels: ModuleType, device: str, value: float, constant: float | None
) -> None:
    x = inputs(device, 3, 40)
    x[1, 7] = value
    scale = kernels.rounded(x, 127.5, constant)[1]
    assert scale[[0, 2]].isfinite().all() and scale[1].isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_sums(kernels: ModuleType, device: str, dtype: torch.dtype) -> None:
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("triton's interpreter cuts numbers off for bfloat16")
    generator = torch.Generator().manual_seed(0)
    sums = torch.randint(-(1 << 24), 1 << 24, (3, 1500), generator=generator, dtype=torch.int32).to(device)
    rows, columns = (torch.rand(shape, generator=generator).to(device) for shape in ((3, 1), (1, 1500)))
    found = kernels.scaled(sums, rows, columns, dtype)
    assert torch.equal(found, (sums * rows * columns).to(dtype))
    part = sums[:, :800]  # with gaps between rows
    assert torch.equal(kernels.scaled(part, rows, columns, dtype), (part * rows * columns[:, :800]).to(dtype))


def test_no_rows(kernels: ModuleType, device: str) -> None:
    codes, scale = kernels.rounded(torch.empty(0, 16, device=device), 127.5, None)
    assert codes.shape == (0, 16) and codes.dtype == torch.int8 and scale.shape == (0, 1)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_compiled() -> None:
    from sparsebit.kernels import eight_bits

    def product(x: torch.Tensor) -> torch.Tensor:
        codes, scale = eight_bits.round_rows(x, 127.5, None)
        return codes.float() * scale

    x = inputs("cuda", 5, 64, torch.bfloat16)
    assert torch.equal(torch.compile(product)(x), product(x))
