"""A convolution or linear layer and the quantizer of its input as one node of autograd.

Two nodes would keep two tensors for the backward: the quantizer its input, for the gradient of the scale, and the layer
the quantized copy of it, for that of the weight. One node can compute the copy again, which is one pass over memory,
and half of what it takes to start two nodes from Python. Values and gradients are those of the two. An activation
function in front of the quantizer can be part of the node too: what it gave is not kept then either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from sparsebit.numerics import operator
from sparsebit.numerics.activations import ACTIVATIONS
from sparsebit.numerics.gradients import LEARNING, Gradient
from sparsebit.numerics.operator import Grid
from sparsebit.quantization.ops.recipes import autocast_dtype
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.quantization.quantizers.recognition import is_operator_alone

Grads = tuple[Tensor | None, Tensor | None, Tensor | None]
_convolution_backward = torch.ops.aten.convolution_backward.default


class _Linear:
    """The layer's arithmetic, below autograd."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = F.linear(x, weight, bias)
        # Not a view (of a matrix): what a node of one's own gives as a view may not be changed in place.
        return torch.unsafe_chunk(y, 1)[0] if y._is_view() else y

    def reads_input(self, needs_weight: bool) -> bool:
        """Whether the backward does."""
        return needs_weight

    def backward(self, grad: Tensor, x: Tensor | None, weight: Tensor, needs: tuple[bool, bool, bool]) -> Grads:
        """The gradients of x, weight and bias, where they are needed."""
        rows = grad.reshape(-1, grad.shape[-1])
        by_x = rows.mm(weight).view(*grad.shape[:-1], weight.shape[1]) if needs[0] else None
        by_weight = None if x is None else rows.t().mm(x.reshape(-1, x.shape[-1]))
        return by_x, by_weight, rows.sum(0) if needs[2] else None


class _Conv(NamedTuple):
    """The same for a convolution, transposed or not, of any number of dimensions."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    is_transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(x, weight, bias, *self)

    def reads_input(self, needs_weight: bool) -> bool:
        return True

    def backward(self, grad: Tensor, x: Tensor | None, weight: Tensor, needs: tuple[bool, bool, bool]) -> Grads:
        bias_size = [grad.shape[1]] if needs[2] else None
        found: Grads = _convolution_backward(grad, x, weight, bias_size, *self, needs)
        return found


class _Plan(NamedTuple):
    """What a call needs besides its tensors.

    `activation`: in front of the quantizer. `kept_below`: bytes; a larger quantized copy is computed again.
    """

    grid: Grid
    gradient: Gradient
    activation: str
    dtype: torch.dtype
    layer: _Linear | _Conv
    kept_below: float
    tag: str

    @property
    def rounding(self) -> tuple[Grid, torch.dtype, str, str]:
        return self.grid, self.dtype, self.tag, self.activation


class _QuantizedLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, weight: Tensor, bias: Tensor | None, plan: _Plan
    ) -> Tensor:
        quantized = operator.quantized(x, scale, zero_point, *plan.rounding, watched=False)
        is_kept = quantized.nbytes < plan.kept_below and plan.layer.reads_input(ctx.needs_input_grad[3])
        ctx.save_for_backward(x, scale, zero_point, weight, quantized if is_kept else None)
        ctx.plan = plan
        return plan.layer.forward(quantized, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (_gradients_with_history if torch.is_grad_enabled() else _gradients)(ctx, grad)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, scale, zero_point, weight, quantized = ctx.saved_tensors
    plan: _Plan = ctx.plan
    *needs, needs_weight, needs_bias, _ = ctx.needs_input_grad
    watched = operator.is_watched(grad, x, scale)
    if quantized is None and plan.layer.reads_input(needs_weight):
        quantized = operator.quantized(x, scale, zero_point, *plan.rounding, watched=watched)
    wanted = (any(needs), needs_weight, needs_bias)
    by_input, by_weight, by_bias = plan.layer.backward(grad, quantized, weight, wanted)
    found: tuple[Tensor | None, ...] = (None, None, None)
    if by_input is not None:
        how = (plan.grid, plan.gradient, tuple(needs), plan.activation)
        found = operator.gradients_of(by_input, x, scale, zero_point, *how, watched=watched)
    return (*found, by_weight, by_bias, None)


def _gradients_with_history(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """For derivatives of derivatives: those of the two nodes, as far as they have any."""
    x, scale, zero_point, weight, _ = ctx.saved_tensors
    plan: _Plan = ctx.plan
    value = ACTIVATIONS[plan.activation].value(x) if plan.activation else x
    quantized = operator.fake_quantize(value, scale, zero_point, *plan.grid, plan.gradient, plan.tag).to(plan.dtype)
    needs = ctx.needs_input_grad[:5]
    # Whatever its value, a bias is added.
    bias = (
        weight.new_zeros(grad.shape[1 if isinstance(plan.layer, _Conv) else -1]).requires_grad_() if needs[4] else None
    )
    output = plan.layer.forward(quantized, weight, bias)
    inputs = [tensor for tensor, needed in zip((x, scale, zero_point, weight, bias), needs, strict=True) if needed]
    found = iter(torch.autograd.grad(output, inputs, grad, create_graph=True, allow_unused=True))
    return (*(next(found) if needed else None for needed in needs), None)


_apply: Callable[..., Tensor] = super(torch.autograd.Function, _QuantizedLayer).apply  # as in `numerics.operator`
_LINEAR = _Linear()


def quantized_layer(
    op: nn.Module, quantizer: Quantizer, x: Any, weight: Tensor, bias: Tensor | None, *, kept_below: float
) -> Tensor | None:
    """`op` on the quantized `x`; None where that cannot be one node, or would keep more than two."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    layer = _arithmetic(op, x)
    if layer is None or not is_operator_alone(quantizer):
        return None
    scale, zero_point = quantizer.operands()
    learns = quantizer.GRADIENT in LEARNING and (scale.requires_grad or zero_point.requires_grad)
    if not (x.requires_grad or learns) or operator.is_watched(x, weight, scale):
        return None
    dtype: torch.dtype = x.dtype
    half = autocast_dtype(x.device.type)
    if half is not None and all(t is None or t.dtype in (torch.float32, half) for t in (x, weight, bias)):
        dtype = half
        weight, bias = weight.to(dtype), bias if bias is None else bias.to(dtype)
    elif half is not None or weight.dtype != dtype or (bias is not None and bias.dtype != dtype):
        return None  # two nodes convert it, or refuse it
    assert quantizer.shortcut
    plan = _Plan(quantizer.shortcut[0], *quantizer.take_over(x), dtype, layer, kept_below, quantizer.name)
    return _apply(x, scale, zero_point, weight, bias, plan)


def _arithmetic(op: nn.Module, x: Any) -> _Linear | _Conv | None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return None
    if isinstance(op, nn.Linear):
        return _LINEAR
    if not isinstance(op, _ConvNd) or isinstance(op.padding, str) or op.padding_mode != "zeros":
        return None
    if x.ndim != len(op.stride) + 2:  # an image without a batch
        return None
    return _Conv(op.stride, op.padding, op.dilation, op.transposed, op.output_padding, op.groups)
