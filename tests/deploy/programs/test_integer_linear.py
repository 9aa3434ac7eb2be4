"""Linear layers as products of integers: exact, for every zero point, shape and scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from sparsebit.deploy.programs.integer_linear import lay_out_linears
from sparsebit.deploy.programs.to_program import to_program
from sparsebit.numerics.fake_quant.operator import OPERATOR


class Linear(nn.Module):
    def __init__(self, zero_point: int, bias: bool, per_channel: bool, outputs: int = 5, inputs: int = 7) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(outputs, inputs, generator=generator))
        self.bias = nn.Parameter(torch.randn(outputs, generator=generator)) if bias else None
        scale = torch.rand(outputs if per_channel else 1, generator=generator) / 32 + 0.01
        self.register_buffer("w_scale", scale)
        self.register_buffer("w_zero", torch.zeros_like(scale))
        self.register_buffer("x_scale", torch.tensor([0.031]))
        self.register_buffer("x_zero", torch.tensor([float(zero_point)]))
        self.axis = 0 if per_channel else None

    def forward(self, x: Tensor) -> Tensor:
        weight = OPERATOR(self.weight, self.w_scale, self.w_zero, self.axis, 0, -127, 127, "ste", "weight")
        x = OPERATOR(x, self.x_scale, self.x_zero, None, 0, 0, 255, "ste", "x")
        return nn.functional.linear(x, weight, self.bias)


def targets(program: Any) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 7), (1, 7)], ids=str)
@pytest.mark.parametrize("zero_point", [0, 100, 128, 255])
@pytest.mark.parametrize(("bias", "per_channel"), [(True, True), (False, True), (True, False)])
@torch.no_grad()
def test_the_product_is_that_of_the_numbers(
    shape: tuple[int, ...], zero_point: int, bias: bool, per_channel: bool
) -> None:
    model, x = Linear(zero_point, bias, per_channel).eval(), 4 * torch.randn(shape)
    program = to_program(model, (x,), {}, lay_out=lay_out_linears)
    assert "aten._int_mm.default" in targets(program) and "aten.linear.default" not in targets(program)
    torch.testing.assert_close(program.module()(x), model(x), rtol=0, atol=2e-6)
    kinds = [tensor.dtype for tensor in program.state_dict.values() if tensor.dim() == 2]
    assert kinds == [torch.int8], "a float copy of a weight was kept"


@torch.no_grad()
def test_sums_that_float32_does_not_hold() -> None:
    """Codes at both ends: the sum of 4,096 products is beyond 2^24."""
    model = Linear(0, False, True, 3, 4096).eval()
    model.weight.fill_(100.0)
    x = torch.full((2, 4096), 100.0)
    program = to_program(model, (x,), {}, lay_out=lay_out_linears)
    exact = (255 * 127 * 4096 * model.x_scale.double() * model.w_scale.double()).expand(2, 3)
    torch.testing.assert_close(program.module()(x).double(), exact, rtol=1e-6, atol=0)


@torch.no_grad()
def test_open_sizes() -> None:
    model, x = Linear(9, True, True).eval(), torch.randn(4, 2, 7)
    program = to_program(model, (x,), {}, {"x": {0: Dim("batch")}}, lay_out=lay_out_linears)
    more = torch.randn(11, 2, 7)
    torch.testing.assert_close(program.module()(more), model(more), rtol=0, atol=2e-6)


@torch.no_grad()
def test_float_inputs_stay_float() -> None:
    model = nn.Linear(7, 5).eval()
    program = to_program(model, (torch.randn(2, 7),), {}, lay_out=lay_out_linears)
    assert "aten._int_mm.default" not in targets(program)
