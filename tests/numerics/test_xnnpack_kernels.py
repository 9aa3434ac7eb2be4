"""The kernels against XNNPACK itself, over all pairs of codes, and known answers where halves decide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsebit.numerics import xnnpack_kernels

Grid = tuple[float, int]
CODES = torch.arange(-128.0, 128.0)
LEFT, RIGHT = (codes.reshape(1, 1, 256, 256) for codes in torch.meshgrid(CODES, CODES, indexing="ij"))
# Equal scales twice as fine as the result's: every second sum lies between two codes.
ADDS = [((0.5, 3), (0.5, -7), (1.0, 5)), ((0.25, 0), (0.5, 1), (1.0, 0)), ((0.031, 12), (0.177, -90), (0.2, 41))]
PRODUCTS = [((0.5, 0), (0.5, 0), (0.5, 3)), ((0.031, 12), (0.177, -90), (0.6, 41))]


def numbers(*grids: Grid) -> tuple[Any, Any]:
    return tuple(torch.tensor(scale) for scale, _ in grids), tuple(torch.tensor(float(zero)) for _, zero in grids)


def by_kernel(function: Callable[..., Tensor], a: Tensor, b: Tensor, grids: tuple[Grid, Grid, Grid]) -> Tensor:
    scales, zero_points = numbers(*grids)
    values = [(codes - zero) * scale for codes, (scale, zero) in zip((a, b), grids, strict=False)]
    found = function(*values, scales, zero_points)
    return ((found / scales[2]).round() + zero_points[2]).clamp(-128, 127)


def test_a_sum_in_the_middle_of_two_codes_is_rounded_up() -> None:
    codes = torch.tensor([-3.0, -1.0, 1.0, 3.0])
    found = by_kernel(xnnpack_kernels.add, codes, torch.zeros(4), ((0.5, 0), (0.5, 0), (1.0, 0)))
    assert found.tolist() == [-1, 0, 1, 2]


def test_a_product_and_a_mean_in_the_middle_are_rounded_to_the_even_code() -> None:
    codes = torch.tensor([-3.0, -1.0, 1.0, 3.0])
    found = by_kernel(xnnpack_kernels.multiply, codes, torch.ones(4), ((0.5, 0), (1.0, 0), (1.0, 1)))
    assert (found - 1).tolist() == [-2, 0, 0, 2]  # before the zero point is added, which makes odd codes of even ones
    images = torch.tensor([[0.0, 1.0], [1.0, 2.0]]).reshape(2, 1, 2, 1)
    means = xnnpack_kernels.image_mean(images, torch.tensor(1.0), torch.tensor(1.0))
    assert means.flatten().tolist() == [0, 2] and means.shape == (2, 1, 1, 1)


def test_a_float_is_multiplied_by_the_reciprocal() -> None:
    scale, zero = torch.tensor(0.1), torch.tensor(2.0)
    x = torch.tensor([0.05, 0.15, 1e9, -1e9, 0.35, float("nan")])
    found = xnnpack_kernels.quantized(x, scale, zero, -128, 127)
    expected = (x * (1 / scale)).round().clamp(-130, 125) * scale
    assert torch.equal(found[:-1], expected[:-1]) and found[-1].isnan()
    negative = xnnpack_kernels.quantized(x, -scale, zero, -128, 127)  # a learned scale on its way through zero
    assert torch.equal(found[:-1], negative[:-1])
    many = torch.linspace(-12, 12, 100_001)
    divided = torch.fake_quantize_per_tensor_affine(many, 0.1, 2, -128, 127)
    assert (divided - xnnpack_kernels.quantized(many, scale, zero, -128, 127)).abs().max() < 0.11


# --- against XNNPACK


class Steps(nn.Module):
    """`op` of dequantized inputs, quantized."""

    def __init__(self, op: Callable[..., Tensor], *grids: Grid) -> None:
        super().__init__()
        self.op, self.grids = op, grids

    def forward(self, *inputs: Tensor) -> Tensor:
        values = [on_grid(x, *grid) for x, grid in zip(inputs, self.grids, strict=False)]
        return on_grid(self.op(*values), *self.grids[-1])


class Two(Steps):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(a, b)


class One(Steps):
    def forward(self, a: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(a)


def on_grid(x: Tensor, scale: float, zero: int) -> Tensor:
    from torch.ao.quantization.fx import _decomposed  # noqa: F401 (defines the operators)

    ops = torch.ops.quantized_decomposed
    grid = (scale, zero, -128, 127, torch.int8)
    return ops.dequantize_per_tensor(ops.quantize_per_tensor(x, *grid), *grid)


def in_xnnpack(module: nn.Module, *inputs: Tensor) -> Tensor:
    pytest.importorskip("executorch")
    from sparsebit.deploy.programs.executorch import _quietly
    from sparsebit.deploy.sessions.executorch_session import runtime_modules

    with _quietly():
        runtime_modules()
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower
        from executorch.runtime import Runtime

        lowered = to_edge_transform_and_lower(
            torch.export.export(module, inputs), partitioner=[XnnpackPartitioner()]
        ).to_executorch()
        found: Tensor = Runtime.get().load_program(lowered.buffer).load_method("forward").execute(list(inputs))[0]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "kernel", "grids"),
    [
        *((torch.add, xnnpack_kernels.add, grids) for grids in ADDS),
        *((torch.mul, xnnpack_kernels.multiply, grids) for grids in PRODUCTS),
    ],
)
def test_all_pairs_of_codes(op: Any, kernel: Any, grids: tuple[Grid, Grid, Grid]) -> None:
    inputs = [(codes - zero) * scale for codes, (scale, zero) in zip((LEFT, RIGHT), grids, strict=False)]
    found = in_xnnpack(Two(op, *grids), *inputs)
    scale, zero = grids[2]
    assert torch.equal((found / scale).round() + zero, by_kernel(kernel, LEFT, RIGHT, grids))


@pytest.mark.slow
@pytest.mark.parametrize("grids", [((0.21875, 0), (0.125, 0)), ((0.05, -20), (0.031, 7))])
def test_means(grids: tuple[Grid, Grid]) -> None:
    (scale, zero), (output_scale, output_zero) = grids
    codes = torch.randint(-128, 128, (1, 20_000, 7, 7), generator=torch.Generator().manual_seed(0)) - zero
    x = codes.clamp(-128 - zero, 127 - zero) * scale
    found = in_xnnpack(One(lambda a: a.mean((2, 3), True), *grids), x)
    mine = xnnpack_kernels.image_mean(x, torch.tensor(scale), torch.tensor(output_scale)) / output_scale
    assert torch.equal((found / output_scale).round(), mine.round().clamp(-128 - output_zero, 127 - output_zero))


@pytest.mark.slow
def test_floats_between_two_codes() -> None:
    scale = float(torch.tensor(0.037))
    middles = (torch.arange(-128, 128) + 0.5) * scale
    bits = middles.view(torch.int32)[:, None] + torch.arange(-3, 4, dtype=torch.int32)
    x = bits.view(torch.float32).reshape(1, -1)
    found = in_xnnpack(One(lambda a: a, (scale, 5)), x)
    mine = xnnpack_kernels.quantized(x, torch.tensor(scale), torch.tensor(5.0), -128, 127)
    assert torch.equal(found, mine) and (mine != (x / scale).round() * scale).any()
