"""Fake-quant below autograd, in one pass with an activation function before it and a conversion after it.

Used inside fused autograd nodes: on a GPU it is one kernel, elsewhere separate steps with the same values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsebit.errors import SpecError
from sparsebit.kernels.activations import ACTIVATIONS, with_activation
from sparsebit.kernels.compilation import KERNEL_DTYPES
from sparsebit.numerics import plain
from sparsebit.numerics.fake_quant import operator
from sparsebit.numerics.fake_quant.gradients import LEARNING, Found
from sparsebit.numerics.fake_quant.operator import Grid, is_intercepted, kernels_for
from sparsebit.numerics.reference import compute_dtype


def fuses(x: Tensor) -> bool:
    """Whether the kernels for such a tensor fuse more operations into the same pass."""
    return kernels_for(x).fuses and x.dtype in KERNEL_DTYPES


def quantized(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    grid: Grid,
    dtype: torch.dtype,
    tag: str,
    activation: str = "",
    *,
    intercepted: bool | None = None,
) -> Tensor:
    """`x`, or the named activation function of `x`, on its grid, in the type `dtype`.

    `intercepted`: the result of `is_intercepted`, if the caller knows it.
    """
    if is_intercepted(x, scale, zero_point) if intercepted is None else intercepted:
        value = ACTIVATIONS[activation].value(x) if activation else x
        return operator.below_autograd(value, scale, zero_point, *grid, "ste", tag).to(dtype)
    kernels = kernels_for(x)
    if activation and not kernels.fuses:
        x, activation = ACTIVATIONS[activation].value(x), ""
    try:
        if activation or (dtype != x.dtype and kernels.fuses):
            return kernels.forward(x, scale, zero_point, *grid, dtype, activation)
        y = kernels.forward(x, scale, zero_point, *grid)
    except SpecError as error:
        raise SpecError(f"{tag}: {error}") from None
    return y if dtype == x.dtype else y.to(dtype)


def gradients_of(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    grid: Grid,
    gradient: str,
    needs: tuple[bool, ...],
    activation: str = "",
) -> Found:
    """The gradients of x, scale and zero point for `grad`, if they are needed and learned."""
    kernels = kernels_for(x)
    if not activation or not kernels.fuses or is_intercepted(grad, x, scale):
        rest = (grid, gradient, needs)
        return with_activation(operator.gradients_of, grad, x, scale, zero_point, rest, activation)
    if gradient not in LEARNING:
        needs = (needs[0], False, False)
    return kernels.backward(grad, x, scale, zero_point, *grid, gradient, *needs, activation)


def slopes(
    x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid, gradient: str, needs: tuple[bool, bool], tag: str
) -> tuple[Tensor, list[Tensor]]:
    """`x` on the grid of one scale, and the derivative of each number by scale and zero point, as far as needed.

    Without LSQ's factor; in the type of `x`.
    """
    wide = x.to(compute_dtype(x.dtype))
    y = operator.fake_quantize(wide, scale, zero_point, *grid, "ste", tag)
    step = plain.magnitude(plain.align(scale, x, None, 0))

    def where_inside(values: Tensor) -> Tensor:
        found = operator.gradients_of(values, wide, scale, zero_point, grid, gradient, (True, False, False))[0]
        assert found is not None
        return found

    found = []
    if needs[0]:
        found.append((y - where_inside(y if gradient == "pact" else wide)) * (scale.sign() / step))
    if needs[1]:
        found.append((where_inside(torch.ones_like(wide)) - 1.0) * step)
    return y.to(x.dtype), [slope.to(x.dtype) for slope in found]
