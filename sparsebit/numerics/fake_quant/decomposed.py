"""Fake-quant as plain tensor algebra, which a compiler fuses with the ops around it (batch norm, ReLU, dropout).

`torch.compile` with inductor uses this form instead of the opaque operator: one kernel reads the convolution's
output and writes the input of the next one, and the backward recomputes its inputs instead of loading them. Values are
those of `plain`; a compiler that divides by a reciprocal may round a number that is halfway to the other side.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sparsebit.numerics.fake_quant.gradients import lsq_factor
from sparsebit.numerics.plain import align, aligned_shape, as_blocks
from sparsebit.numerics.qparams import SMALLEST_SCALE
from sparsebit.numerics.spec import pad_groups

ROW = 256  # elements and more for a first sum


@lru_cache(maxsize=1)
def register() -> None:
    """Hand the algebra to inductor; called when something is compiled, because inductor is slow to import.

    torch's cache of compiled graphs on disk does not see this table: rename the operator when the algebra changes.
    """
    from torch._inductor import decomposition

    decomposition.register_decomposition([torch.ops.sparsebit.fake_quantize.default])(fake_quantize)
    decomposition.register_decomposition([torch.ops.sparsebit.fake_quantize_backward.default])(backward)
    # An earlier compilation may have made a copy of the table.
    getattr(decomposition.fast_random_decomps, "cache_clear", lambda: None)()


def fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor, *rest: Any) -> Tensor:
    """As `plain.fake_quantize`; `rest`: the other arguments of the operator."""
    axis, group_size, qmin, qmax = rest[:4]
    if _is_ragged(x, axis, group_size):
        wide = pad_groups(x, axis, group_size)
        return fake_quantize(wide, scale, zero_point, *rest).narrow(axis, 0, x.shape[axis])
    values, step, low, high = _on_grid(x, scale, zero_point, axis, group_size, qmin, qmax)
    codes = values.round()
    # Comparisons propagate NaN without a test; minimum and maximum would test for it.
    clipped = torch.where(codes < low, low, torch.where(codes > high, high, codes))
    return (clipped * step).reshape(x.shape).to(x.dtype)


def backward(grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, *rest: Any) -> list[Tensor]:
    """As `gradients.backward`, only the needed ones."""
    axis, group_size, qmin, qmax, gradient, needs_x, needs_scale, needs_zero_point = rest
    if _is_ragged(x, axis, group_size):
        wide_grad, wide_x = (pad_groups(t, axis, group_size) for t in (grad, x))
        found = backward(wide_grad, wide_x, scale, zero_point, *rest)
        return [found[0].narrow(axis, 0, x.shape[axis]), *found[1:]] if needs_x else found
    values, step, low, high = _on_grid(x, scale, zero_point, axis, group_size, qmin, qmax)
    wide_grad = as_blocks(grad.to(values.dtype), axis, group_size)
    codes = values.round()
    judged = values if gradient == "pact" else codes
    inside = (judged >= low) & (judged <= high)
    if gradient.startswith("relu_"):
        inside = inside & (values > 0)
    found = []
    if needs_x:
        found.append(torch.where(inside, wide_grad, 0.0).reshape(x.shape).to(x.dtype))
    factor = 1.0 if gradient == "pact" else lsq_factor(x.numel(), scale.numel(), qmax)
    if needs_scale:
        end = torch.where(judged < high, low, high)
        terms = torch.where(inside, torch.zeros_like(codes) if gradient == "pact" else codes - values, end)
        total = _summed(terms * wide_grad, x, scale, axis, group_size, factor * scale.sign())
        found.append(total.to(scale.dtype))
    if needs_zero_point:
        outside = torch.where(inside, 0.0, wide_grad)
        total = _summed(outside, x, zero_point, axis, group_size, -factor * step.reshape(zero_point.shape))
        found.append(total.to(zero_point.dtype))
    return found


def _is_ragged(x: Tensor, axis: int | None, group_size: int) -> bool:
    return axis is not None and bool(group_size) and x.shape[axis] % group_size != 0


def _on_grid(
    x: Tensor, scale: Tensor, zero_point: Tensor, axis: int | None, group_size: int, qmin: int, qmax: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The values in steps, the step, and the ends of the grid counted from zero."""
    step = align(scale, x, axis, group_size).abs().clamp_min(SMALLEST_SCALE)
    shift = align(zero_point, x, axis, group_size).round()
    return as_blocks(x.to(step.dtype), axis, group_size) * step.reciprocal(), step, qmin - shift, qmax - shift


def _summed(terms: Tensor, x: Tensor, param: Tensor, axis: int | None, group_size: int, factor: Tensor) -> Tensor:
    """The sum of each parameter's terms, times `factor`, which has the parameters' shape."""
    if param.numel() == 1:
        # The factor comes first, so that nothing remains to be done after the last sum (`sums.JoinSums`).
        return (_first_sums(terms) * factor.reshape(())).sum().reshape(param.shape)
    total = terms.sum_to_size(aligned_shape(x.shape, axis, group_size, param.numel()))
    return total.reshape(param.shape) * factor


def _first_sums(terms: Tensor) -> Tensor:
    """The first of two sums, as a vector, over the same dimensions as the backward of the norm before it.

    A compiler then makes one pass for both: a batch norm's backward sums over all but the channels, a layer norm's over
    the last dimension. Otherwise it follows the order of memory, as any other order is many times slower.
    """
    if terms.ndim == 4 and terms.stride(1) == 1 and terms.shape[1] > 1:
        return terms.sum((0, 2, 3))
    strides = terms.stride()
    order = sorted(range(terms.ndim), key=lambda dim: -strides[dim])
    size, dims = 1, []
    while order and size < ROW:
        dims.append(order.pop())
        size = size * terms.shape[dims[-1]]
    return terms.sum(dims).flatten() if dims else terms.reshape(-1)
