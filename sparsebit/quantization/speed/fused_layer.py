"""`FusedLayer`: a convolution or linear layer and the quantizer of its input as one node of autograd.

Two nodes would keep two tensors for the backward: the quantizer its input, for the gradient of the scale, and the layer
the quantized copy of it, for that of the weight. One node can recompute the copy, which is one pass over memory, and
it saves half of the time to start two nodes from Python. An activation function before the quantizer can be part of
the node too: then its output is not kept either.

The invariant: values, dtypes and gradients are those of the two nodes, also under autocast and for second derivatives.
Where that is not certain (a hook, a dtype that two nodes would convert), the plain modules run. `Acceleration` replaces
the forward of every `WeightedQuantOpr` by this.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from sparsebit.graph.values.own_tensors import with_own_tensors
from sparsebit.kernels.activations import ACTIVATIONS
from sparsebit.numerics.fake_quant import dispatch, operator
from sparsebit.numerics.fake_quant.gradients import LEARNING, Gradient
from sparsebit.numerics.fake_quant.operator import Grid, grid_of
from sparsebit.quantization.ops.layer_call import forward_with
from sparsebit.quantization.ops.quant_opr import WeightedQuantOpr
from sparsebit.quantization.quantizers.base import reads_copies
from sparsebit.quantization.speed.below_autograd import gradients_of, quantized
from sparsebit.quantization.speed.first_layer import first_layer
from sparsebit.quantization.speed.fusion_guards import (
    Substitute,
    may_fuse,
    rounds_otherwise,
    runs_user_code,
    substitute_of,
)
from sparsebit.quantization.speed.recomputation import as_autocast, autocast_dtype, recompute_of
from sparsebit.quantization.speed.savings import Savings

LARGE = 16 << 20  # bytes; recomputing a smaller copy costs more time than its memory is worth
# Layers whose arithmetic is known by their class.
_LAYERS = frozenset(
    kind
    for home in (torch.nn.modules.conv, torch.nn.modules.linear)
    for kind in vars(home).values()
    if isinstance(kind, type) and issubclass(kind, nn.Linear | _ConvNd)
)
Grads = tuple[Tensor | None, Tensor | None, Tensor | None]
_convolution_backward = torch.ops.aten.convolution_backward.default


class _Linear:
    """The layer's arithmetic, below autograd."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = F.linear(x, weight, bias)
        # `unsafe_chunk` returns the same memory, not as a view: a view from a custom node cannot be changed in place.
        return torch.unsafe_chunk(y, 1)[0] if y._is_view() else y

    def reads_input(self, needs_weight: bool) -> bool:
        """Whether the backward reads the input."""
        return needs_weight

    def backward(self, grad: Tensor, x: Tensor | None, weight: Tensor, needs: tuple[bool, bool, bool]) -> Grads:
        """The gradients of x, weight and bias, if they are needed."""
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


class _Settings(NamedTuple):
    """The arguments of a call other than its tensors.

    `activation`: the function before the quantizer. `kept_below`: bytes; a larger quantized copy is recomputed.
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
        ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, weight: Tensor, bias: Tensor | None, settings: _Settings
    ) -> Tensor:
        copy = quantized(x, scale, zero_point, *settings.rounding, intercepted=False)
        is_kept = copy.nbytes < settings.kept_below and settings.layer.reads_input(ctx.needs_input_grad[3])
        ctx.save_for_backward(x, scale, zero_point, weight, copy if is_kept else None)
        ctx.settings = settings
        return settings.layer.forward(copy, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (_gradients_with_history if torch.is_grad_enabled() else _gradients)(ctx, grad)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, scale, zero_point, weight, copy = ctx.saved_tensors
    settings: _Settings = ctx.settings
    *needs, needs_weight, needs_bias, _ = ctx.needs_input_grad
    if copy is None and settings.layer.reads_input(needs_weight):
        copy = quantized(x, scale, zero_point, *settings.rounding)
    by_input, by_weight, by_bias = settings.layer.backward(grad, copy, weight, (any(needs), needs_weight, needs_bias))
    found: tuple[Tensor | None, ...] = (None, None, None)
    if by_input is not None:
        found = gradients_of(
            by_input, x, scale, zero_point, settings.grid, settings.gradient, tuple(needs), settings.activation
        )
    return (*found, by_weight, by_bias, None)


def _gradients_with_history(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients with a graph of their own, for second derivatives: the two nodes run again, and are derived."""
    x, scale, zero_point, weight, _ = ctx.saved_tensors
    settings: _Settings = ctx.settings
    value = ACTIVATIONS[settings.activation].value(x) if settings.activation else x
    copy = operator.fake_quantize(value, scale, zero_point, *settings.grid, settings.gradient, settings.tag).to(
        settings.dtype
    )
    needs = ctx.needs_input_grad[:5]
    # The bias was not saved. Gradients do not depend on its value, so zeros take its place.
    channels = grad.shape[1 if isinstance(settings.layer, _Conv) else -1]
    bias = weight.new_zeros(channels).requires_grad_() if needs[4] else None
    output = settings.layer.forward(copy, weight, bias)
    inputs = [tensor for tensor, needed in zip((x, scale, zero_point, weight, bias), needs, strict=True) if needed]
    found = iter(torch.autograd.grad(output, inputs, grad, create_graph=True, allow_unused=True))
    return (*(next(found) if needed else None for needed in needs), None)


_apply: Callable[..., Tensor] = super(torch.autograd.Function, _QuantizedLayer).apply  # as in `numerics.operator`
_LINEAR = _Linear()


class FusedLayer(Substitute):
    """Replaces a layer's forward: the layer and its input's quantizer run as one node where that is possible.

    `packs`: whether tensors that can be recomputed are dropped after the forward; None: large ones, on a GPU.
    """

    def __init__(self, layer: WeightedQuantOpr, packs: bool | None, savings: Savings) -> None:
        self.layer, self.packs, self.savings = layer, packs, savings
        rounds_otherwise(layer.input_quantizer)  # fills a cache for this class, because a compiler cannot compute it
        self.quantized_weight: Tensor | None = None  # set by `weight_batches` for this forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        layer = self.layer
        # Checked first: everything that is read here while compiling becomes a guard, checked before every call.
        is_left = torch.compiler.is_compiling() and self._is_left_to_a_compiler(args)
        if not is_left and len(args) == 1 and not kwargs and self.computes_itself:
            return self.compute(args[0])
        return type(layer).forward(layer, *args, **kwargs)

    def _is_left_to_a_compiler(self, args: tuple[Any, ...]) -> bool:
        """Whether a compiler gets the plain layer, as it fuses by itself: all but the first layer (`first_layer`)."""
        return type(self.layer.op) is not nn.Conv2d or len(args) != 1 or args[0].requires_grad

    @property
    def computes_itself(self) -> bool:
        """Whether the layer trains and nothing but its arithmetic runs; otherwise the layer itself is called."""
        layer = self.layer
        return (
            layer.training and layer.weight_quantizer.is_enable and _is_plain(layer.op) and not runs_user_code(layer.op)
        )

    def compute(self, x: Any, gradient: Gradient | None = None, activation: str = "") -> Any:
        """The layer on the quantized `x`, with the named activation function before the quantizer.

        `gradient`: which gradient the rounding has, if not the quantizer's own: a fused ReLU changes it.
        """
        layer = self.layer
        op, quantizer = layer.op, layer.input_quantizer
        weight = layer.weight_quantizer(op.weight) if self.quantized_weight is None else self.quantized_weight
        bias = layer.stored_bias()
        may_be_fused = may_fuse(quantizer, (op,), x)
        if may_be_fused and reads_copies(quantizer):  # the quantizer's hook copies its input, and does not run here
            x = x.clone()
        if may_be_fused and not activation and self.savings.first_layer:
            found = first_layer(op, quantizer, x, weight, bias, gradient or quantizer.GRADIENT)
            if found is not None:
                return found
        if may_be_fused and self.savings.fused_layers and not torch.compiler.is_compiling():
            found = self._as_one_node(x, weight, bias, gradient or quantizer.GRADIENT, activation)
            if found is not None:
                return found
        output = forward_with(op, weight, bias, (self._quantized_input(x, gradient, activation),), {})
        return with_own_tensors(output, x)

    def _quantized_input(self, x: Any, gradient: Gradient | None, activation: str) -> Any:
        quantizer = self.layer.input_quantizer
        if gradient is None:
            x = quantizer(ACTIVATIONS[activation].value(x) if activation else x)
        else:
            x = dispatch.fake_quantize(x, *quantizer.operands(), quantizer.spec, gradient=gradient, tag=quantizer.name)
        # Autocast would keep a converted copy for the backward; converted here, the copy can be recomputed, too.
        return as_autocast(x) if recompute_of(x) is not None else x

    def _as_one_node(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, gradient: Gradient, activation: str
    ) -> Tensor | None:
        """The layer as one node; None if it cannot be, or if its input needs no gradient: two nodes keep less."""
        quantizer = self.layer.input_quantizer
        arithmetic = _arithmetic(self.layer.op, x)
        scale, zero_point = quantizer.operands()
        learns = gradient in LEARNING and (scale.requires_grad or zero_point.requires_grad)
        if arithmetic is None or not (x.requires_grad or learns) or operator.is_intercepted(x, weight, scale):
            return None
        dtype: torch.dtype = x.dtype
        half = autocast_dtype(x.device.type)
        if half is not None and all(t is None or t.dtype in (torch.float32, half) for t in (x, weight, bias)):
            dtype = half
            weight, bias = weight.to(dtype), bias if bias is None else bias.to(dtype)
        elif half is not None or weight.dtype != dtype or (bias is not None and bias.dtype != dtype):
            return None  # mixed dtypes: the plain modules convert them, or raise torch's error
        grid, kept_below = grid_of(quantizer.spec), self._kept_below(x)
        settings = _Settings(grid, gradient, activation, dtype, arithmetic, kept_below, quantizer.name)
        return _apply(x, scale, zero_point, weight, bias, settings)

    def _kept_below(self, x: Tensor) -> float:
        """The size in bytes from which a quantized copy is recomputed."""
        if self.packs:
            return 0.0
        return LARGE if self.packs is None and x.is_cuda and self.savings.recomputed_copies else math.inf


def fused_layer_of(layer: WeightedQuantOpr) -> FusedLayer | None:
    """The replacement of the layer's forward, if it can compute the layer by itself."""
    found = substitute_of(layer)
    return found if isinstance(found, FusedLayer) and found.computes_itself else None


def _is_plain(module: nn.Module) -> bool:
    """Whether it is a layer of torch itself, whose arithmetic is known by its class."""
    return type(module) in _LAYERS


def _arithmetic(op: nn.Module, x: Tensor) -> _Linear | _Conv | None:
    if isinstance(op, nn.Linear):
        return _LINEAR
    if not isinstance(op, _ConvNd) or isinstance(op.padding, str) or op.padding_mode != "zeros":
        return None
    if x.ndim != len(op.stride) + 2:  # an image without a batch
        return None
    return _Conv(op.stride, op.padding, op.dilation, op.transposed, op.output_padding, op.groups)
