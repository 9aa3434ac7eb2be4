"""The gradients of fake-quant: straight-through for x, learned step sizes or thresholds for scale and zero point.

Legend: v = x / scale, u = round(v) + zp, q = clamp(u, qmin, qmax), y = (q - zp) * scale, inside = (u == q):

    dy/dx     = 1 inside, 0 outside                      straight-through estimator (Bengio et al. 2013)
    dy/dscale = q - zp - v inside, q - zp outside        LSQ (Esser et al. 2020, eq. 3)
    dy/dzp    = 0 inside, -scale outside                 LSQ+ (Bhalgat et al. 2020, sec. 3.1)

The last two are multiplied by 1 / sqrt(N * qmax), LSQ's gradient scale (sec. 2.2), N elements per scale.

PACT (Choi et al. 2018) clips before it rounds, inside = (qmin <= v + zp <= qmax), and learns from what is clipped:
dy/dscale = 0 inside, q - zp outside, with no factor.

A grid that begins at zero (zp = qmin = 0) is a ReLU by itself: "relu_ste" and "relu_lsq" are the gradients of both, x
being the input of the ReLU: x <= 0 gets no gradient.

Only the magnitude of a scale counts (`plain.magnitude`): a negative scale gets the gradient with the opposite sign.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from sparsebit.numerics.plain import align, aligned_shape, as_blocks, divide, grid, magnitude
from sparsebit.numerics.spec import pad_groups

Found: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None]  # gradients of x, scale and zero point
Gradient: TypeAlias = Literal["ste", "lsq", "pact", "relu_ste", "relu_lsq"]
GRADIENTS: tuple[str, ...] = get_args(Gradient)
LEARNING = frozenset({"lsq", "pact", "relu_lsq"})  # those with gradients for scale and zero point

# grad where low < self < high, else 0, in one pass: on a CPU two comparisons and a product take eight times as long.
_where_inside = torch.ops.aten.hardtanh_backward


def backward(grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, *rest: Any) -> Found:
    """The gradients of x, scale and zero point, each in its own shape and type; None for those that are not needed.

    `rest`: axis, group_size, qmin, qmax, gradient, needs_x, needs_scale, needs_zero_point.
    """
    axis, group_size, qmin, qmax, gradient, needs_x, needs_scale, needs_zero_point = rest
    if axis is not None and group_size and x.shape[axis] % group_size:
        wide_grad, wide_x = (pad_groups(t, axis, group_size) for t in (grad, x))
        wide, grad_scale, grad_zero_point = backward(wide_grad, wide_x, scale, zero_point, *rest)
        grad_x = None if wide is None else torch.empty_like(x).copy_(wide.narrow(axis, 0, x.shape[axis]))
        return grad_x, grad_scale, grad_zero_point

    steps = magnitude(align(scale, x, axis, group_size))
    values = divide(x, steps, axis, group_size)
    judges_values = gradient not in ("ste", "lsq")
    codes = values.round() if needs_scale or judges_values else values.round_()
    low, high, shift = grid(align(zero_point, x, axis, group_size), qmin, qmax)
    if shift is not None:
        as_blocks(codes, axis, group_size).add_(shift)
    # Codes are whole numbers: half a code beyond the ends is the same set, written with strict inequalities.
    judged, ends = codes, (low - 0.5, high + 0.5)
    if gradient.startswith("relu_"):
        judged, ends = values, (0.0, qmax - qmin + 0.5)  # the highest code is odd: halfway above it is beyond
    elif gradient == "pact":
        judged, ends = values, (_beyond(low, -math.inf), _beyond(high, math.inf))
        if shift is not None:
            as_blocks(judged, axis, group_size).add_(shift)
    if grad.dtype != codes.dtype:
        grad = grad.to(codes.dtype)
    if not (needs_scale or needs_zero_point):
        grad_x = _where_inside.grad_input(grad, judged, *ends, grad_input=codes)
        return grad_x.to(x.dtype), None, None

    grad_x = grad_scale = grad_zero_point = None
    if needs_x or needs_zero_point:
        # In the memory order of x, whatever that of grad: compiled code relies on it.
        grad_x = _where_inside.grad_input(grad, judged, *ends, grad_input=torch.empty_like(codes))
    factor = 1.0 if gradient == "pact" else lsq_factor(x.numel(), scale.numel(), qmax)
    if needs_scale:
        if gradient != "pact":
            _where_inside.grad_input(values, judged, *ends, grad_input=values)
        codes.clamp_(low, high)
        if shift is not None:
            as_blocks(codes, axis, group_size).sub_(shift)
        if gradient == "pact":
            _where_inside.grad_input(codes, judged, *ends, grad_input=values)
        grad_scale = _summed(codes.sub_(values).mul_(grad), scale, axis, group_size, factor)
        grad_scale.mul_(scale.sign())
    if needs_zero_point:
        assert grad_x is not None
        outside = torch.sub(grad_x, grad, out=values)
        as_blocks(outside, axis, group_size).mul_(steps)
        grad_zero_point = _summed(outside, zero_point, axis, group_size, factor)
    return None if grad_x is None or not needs_x else grad_x.to(x.dtype), grad_scale, grad_zero_point


@lru_cache(maxsize=256)
def _beyond(end: int, direction: float) -> float:
    """The next number of float32, so that a strict comparison includes the end itself."""
    return torch.nextafter(torch.tensor(float(end)), torch.tensor(direction)).item()


def lsq_factor(num_elements: int, num_params: int, qmax: int) -> float:
    """1 / sqrt(N * qmax). One symmetric bit has qmax 0: it counts as 1. So does the size of an empty tensor.

    Computed in whole numbers up to the root: a compiler's sizes may be symbols, and one graph serves all batch sizes.
    """
    factor: float = (max(num_elements // num_params, 1) * max(qmax, 1)) ** -0.5
    return factor


def _summed(terms: Tensor, param: Tensor, axis: int | None, group_size: int, factor: float) -> Tensor:
    """The elements' terms summed over the rows of `param`, times `factor`, in the shape and type of `param`."""
    if param.numel() == 1:
        total = terms.sum()
    else:
        total = as_blocks(terms, axis, group_size).sum_to_size(
            aligned_shape(terms.shape, axis, group_size, param.numel())
        )
    return total.mul_(factor).reshape(param.shape).to(param.dtype)
