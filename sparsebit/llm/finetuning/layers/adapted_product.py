"""The product of a packed layer and its adapter as one step of autograd.

A training step of a small model spends most of its time calling operators, not computing them: written with `F.linear`,
casts, a product and a sum, an adapter has ten of them, each with a separate node for the backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sparsebit.llm.layers.quant_linear import QuantLinear, outside_autocast

_KEEPS_WEIGHTS: ContextVar[bool] = ContextVar("keeps_weights", default=False)


@contextmanager
def weights_kept() -> Iterator[None]:
    """Inside, unpacked weights are kept from the forward to the backward, which follows at once."""
    token = _KEEPS_WEIGHTS.set(True)
    try:
        yield
    finally:
        _KEEPS_WEIGHTS.reset(token)


def trains(layer: nn.Module, x: Tensor, down: Tensor) -> bool:
    """Whether this is a training step of a layer that `adapted_product` supports; otherwise kernels may round x."""
    if not torch.is_grad_enabled() or not (x.requires_grad or down.requires_grad):
        return False
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    is_plain = type(layer) is QuantLinear and layer.inputs is None and not any(hooks)
    return is_plain and not torch.is_autocast_enabled(x.device.type)


def adapted_product(layer: QuantLinear, x: Tensor, down: Tensor, up: Tensor, scaling: float) -> Tensor:
    """`layer(x) + x @ down.T @ up.T * scaling`, computed in the type of x; gradients of x, `down` and `up`."""
    y: Tensor = _AdaptedProduct.apply(x, down, up, layer, scaling)  # type: ignore[no-untyped-call]
    return y


class _AdaptedProduct(torch.autograd.Function):
    """Keeps x, the channels between `down` and `up`, both in the type of x, and the layer, still packed. Under gradient
    checkpointing also the unpacked weight: one block at a time has it, from its second forward to its backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, down: Tensor, up: Tensor, layer: QuantLinear, scaling: float) -> Tensor:
        down, scaled_up = down.to(x.dtype), torch.mul(up, scaling, out=up.new_empty(up.shape, dtype=x.dtype))
        inner = _rows(x) @ down.t()
        weight = layer.dense_weight(x.dtype) if _keeps_weight() else None
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        y = layer.exact_product(x) if weight is None else F.linear(x, weight, bias)
        # In the memory of `y`, unless selective checkpointing may have kept that.
        rows, is_watched = _rows(y), not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack()
        add = rows.addmm if is_watched else rows.addmm_
        y = add(inner, scaled_up.t()).view(y.shape)
        ctx.save_for_backward(x, inner, down, scaled_up, weight)
        ctx.layer, ctx.scaling, ctx.dtype = layer, scaling, up.dtype
        return y

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, inner, down, scaled_up, weight = ctx.saved_tensors
        layer: QuantLinear = ctx.layer
        needs_x, needs_down, needs_up = ctx.needs_input_grad[:3]
        rows = _rows(gradient)
        of_inner = rows @ scaled_up
        of_x = of_down = of_up = None
        if needs_x:
            of_x = layer.input_gradient(rows) if weight is None else rows @ weight
            of_x = of_x.addmm_(of_inner, down).view(x.shape)
        if needs_down:
            of_down = _product(of_inner.t(), _rows(x), ctx.dtype)
        if needs_up:
            of_up = _product(rows.t(), inner, ctx.dtype).mul_(ctx.scaling)
        return of_x, of_down, of_up, None, None


def _keeps_weight() -> bool:
    """Whether the backward follows at once (`weights_kept`), or saved tensors are dropped and recomputed."""
    if torch.compiler.is_compiling():  # a compiler decides what it keeps, and cannot read the hooks
        return False
    if _KEEPS_WEIGHTS.get():
        return True
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Into `dtype`; GPUs write the sums of 16-bit products as float32 without rounding them in between."""
    if left.is_cuda and dtype == torch.float32 and left.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)
