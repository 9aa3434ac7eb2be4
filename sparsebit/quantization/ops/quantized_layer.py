"""A convolution or linear layer and the quantizer of its input as one node of autograd.

Two nodes would keep two tensors for the backward: the quantizer its input, for the gradient of the scale, and the layer
the quantized copy of it, for that of the weight. One node can compute the copy again, which is one pass over memory,
and half of what it takes to start two nodes from Python. Values and gradients are those of the two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from sparsebit.numerics import operator
from sparsebit.numerics.operator import Grid
from sparsebit.quantization.ops.recipes import autocast_dtype
from sparsebit.quantization.quantizers.base import Quantizer

Grads = tuple[Tensor | None, Tensor | None, Tensor | None]
_convolution_backward = torch.ops.aten.convolution_backward.default


class _Linear:
    """The layer's arithmetic, below autograd."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, bool, bool]) -> Grads:
        """The gradients of x, weight and bias, where they are needed."""
        rows = grad.reshape(-1, grad.shape[-1])
        by_x = rows.mm(weight).view(x.shape) if needs[0] else None
        by_weight = rows.t().mm(x.reshape(-1, x.shape[-1])) if needs[1] else None
        return by_x, by_weight, rows.sum(0) if needs[2] else None


class _Conv(NamedTuple):
    """The same for a convolution of any number of dimensions."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    is_transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(x, weight, bias, *self)

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, bool, bool]) -> Grads:
        bias_size = [grad.shape[1]] if needs[2] else None
        found: Grads = _convolution_backward(grad, x, weight, bias_size, *self, needs)
        return found


class _Plan(NamedTuple):
    """What a call needs besides its tensors. `kept_below`: bytes; a larger quantized copy is computed again."""

    grid: Grid
    gradient: str
    dtype: torch.dtype
    layer: _Linear | _Conv
    kept_below: float


class _QuantizedLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, weight: Tensor, bias: Tensor | None, plan: _Plan
    ) -> Tensor:
        quantized = operator.quantized(x, scale, zero_point, plan.grid, plan.dtype)
        ctx.save_for_backward(x, scale, zero_point, weight, quantized if quantized.nbytes < plan.kept_below else None)
        ctx.plan = plan
        return plan.layer.forward(quantized, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (_gradients_once if torch.is_grad_enabled() else _gradients)(ctx, grad)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, scale, zero_point, weight, quantized = ctx.saved_tensors
    plan: _Plan = ctx.plan
    needs_x, needs_scale, needs_zero_point, *needs_params, _ = ctx.needs_input_grad
    needs_input = needs_x or needs_scale or needs_zero_point
    if quantized is None:
        quantized = operator.quantized(x, scale, zero_point, plan.grid, plan.dtype)
    by_input, by_weight, by_bias = plan.layer.backward(grad, quantized, weight, (needs_input, *needs_params))
    found: Grads = (None, None, None)
    if by_input is not None:
        needs = (needs_x, needs_scale, needs_zero_point)
        found = operator.gradients_of(by_input, x, scale, zero_point, plan.grid, plan.gradient, needs)
    return (*found, by_weight, by_bias, None)


_gradients_once = once_differentiable(_gradients)
_apply: Callable[..., Tensor] = super(torch.autograd.Function, _QuantizedLayer).apply  # as in `numerics.operator`
_LINEAR = _Linear()


def quantized_layer(
    op: nn.Module, quantizer: Quantizer, x: Any, weight: Tensor, bias: Tensor | None, *, kept_below: float
) -> Tensor | None:
    """`op` on the quantized `x`; None where that cannot be one node, or where there is nothing to differentiate."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    layer = _arithmetic(op, x)
    if layer is None or not quantizer.is_operator_alone:
        return None
    dtype: torch.dtype = x.dtype
    half = autocast_dtype(x.device.type)
    if half is not None and dtype != torch.float64:
        dtype = half
    elif weight.dtype != dtype:
        return None
    scale, zero_point = quantizer.operands()
    if operator.is_watched(x, weight, scale):
        return None
    if weight.dtype != dtype:
        weight = weight.to(dtype)
    if bias is not None and bias.dtype != dtype:
        bias = bias.to(dtype)
    plan = _Plan(operator.grid_of(quantizer.spec), quantizer.gradient_for(x), dtype, layer, kept_below)
    return _apply(x, scale, zero_point, weight, bias, plan)


def _arithmetic(op: nn.Module, x: Any) -> _Linear | _Conv | None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return None
    if isinstance(op, nn.Linear):
        return _LINEAR
    if not isinstance(op, _ConvNd) or isinstance(op, _ConvTransposeNd) or isinstance(op.padding, str):
        return None
    if op.padding_mode != "zeros" or x.ndim != len(op.stride) + 2:  # an image without a batch
        return None
    return _Conv(op.stride, op.padding, op.dilation, False, op.output_padding, op.groups)
