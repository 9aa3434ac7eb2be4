"""Fake-quant to 8-bit floats, float8_e4m3fn: 4 bits of exponent, 3 of mantissa, no infinity, the largest number 448.

`y = float8(clamp(x / scale, -448, 448)) * scale`, rounded half to even, subnormal numbers included, as ONNX defines
QuantizeLinear with saturation. Half precision computes in float32 and returns in its own type. NaN stays NaN; infinity
takes the largest number. Backward is straight through where `x / scale` rounds to a number of the format, zero beyond.

Its numbers are close together near zero and far apart at the ends: the error is relative to each value, at most 1/17
of it (except for subnormal numbers), and not to the largest one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsebit.errors import SpecError
from sparsebit.numerics.plain import align, divide
from sparsebit.numerics.reference import nearest_float8
from sparsebit.numerics.spec import LARGEST_FLOAT8

# Half a step beyond the largest number: values in between round down to it.
_OUTSIDE = LARGEST_FLOAT8 + 16


def fake_quantize(x: Tensor, scale: Tensor, axis: int | None, tag: str = "") -> Tensor:
    """The nearest product of a float8 and its scale to each value of `x`, in the form and type of `x`.

    `scale`: one, or one per index along `axis`. `tag`: the name of the site for export and errors.
    """
    if not x.is_floating_point():
        raise SpecError(f"{tag or 'fake_float8'}: a tensor of {x.dtype}: only floating-point tensors are quantized")
    return OPERATOR(x, scale, axis, tag)


def codes_of(x: Tensor, scale: Tensor, axis: int | None) -> Tensor:
    """The numbers that a file stores, as float32: `y / scale`."""
    return nearest_float8(divide(x.float(), align(scale.float(), x.float(), axis, 0), axis, 0))


@torch.library.custom_op(
    "sparsebit::fake_float8", mutates_args=(), schema="(Tensor x, Tensor scale, int? axis, str tag) -> Tensor"
)
def _fake_float8(x: Tensor, scale: Tensor, axis: int | None, tag: str) -> Tensor:
    try:
        scale = align(scale, x, axis, 0)
    except SpecError as error:
        raise SpecError(f"{tag or 'fake_float8'}: {error}") from None
    return nearest_float8(divide(x, scale, axis, 0)).mul_(scale).to(x.dtype)


@torch.library.custom_op(
    "sparsebit::fake_float8_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor scale, int? axis) -> Tensor",
)
def _fake_float8_backward(grad: Tensor, x: Tensor, scale: Tensor, axis: int | None) -> Tensor:
    outside = divide(x, align(scale, x, axis, 0), axis, 0).abs_() >= _OUTSIDE
    return torch.empty_like(x).copy_(grad).masked_fill_(outside, 0)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, int | None, str], output: Tensor) -> None:
    x, scale, ctx.axis, _ = inputs
    ctx.save_for_backward(x, scale)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, scale = ctx.saved_tensors
    return _fake_float8_backward(grad, x, scale, ctx.axis), None, None, None


_fake_float8.register_fake(lambda x, scale, axis, tag: torch.empty_like(x))
_fake_float8_backward.register_fake(lambda grad, x, scale, axis: torch.empty_like(x))
_fake_float8.register_autograd(_backward, setup_context=_keep)
OPERATOR: Callable[..., Tensor] = torch.ops.sparsebit.fake_float8.default
