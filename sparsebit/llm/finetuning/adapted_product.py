"""The product of a packed layer and its adapter as one step of autograd.

A training step of a small model spends most of its time calling operators, not computing them: written with `F.linear`,
casts, a product and a sum, an adapter has ten of them, each with a node of its own for the backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sparsebit.llm.quant_linear import QuantLinear


def trains(layer: nn.Module, x: Tensor, down: Tensor) -> bool:
    """Whether this is a training step of a layer that `adapted_product` takes; without one, kernels may round x."""
    if not torch.is_grad_enabled() or not (x.requires_grad or down.requires_grad):
        return False
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    return type(layer) is QuantLinear and not any(hooks) and not torch.is_autocast_enabled(x.device.type)


def adapted_product(layer: QuantLinear, x: Tensor, down: Tensor, up: Tensor, scaling: float) -> Tensor:
    """`layer(x) + x @ down.T @ up.T * scaling`, computed in the type of x; gradients of x, `down` and `up`."""
    y: Tensor = _AdaptedProduct.apply(x, down, up, layer, scaling)  # type: ignore[no-untyped-call]
    return y


class _AdaptedProduct(torch.autograd.Function):
    """Keeps x, the few channels between `down` and `up`, and the layer, whose weight stays packed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, down: Tensor, up: Tensor, layer: QuantLinear, scaling: float) -> Tensor:
        inner = _rows(x) @ down.to(x.dtype).t() * scaling
        y = layer.exact_product(x)
        y = torch.addmm(_rows(y), inner, up.to(x.dtype).t()).view(y.shape)
        ctx.save_for_backward(x, inner, down, up)
        ctx.layer, ctx.scaling = layer, scaling
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, inner, down, up = ctx.saved_tensors
        layer: QuantLinear = ctx.layer
        needs_x, needs_down, needs_up = ctx.needs_input_grad[:3]
        rows = _rows(gradient)
        of_inner = rows @ up.to(rows.dtype) * ctx.scaling
        of_x = of_down = of_up = None
        if needs_x:
            of_x = layer.input_gradient(rows).addmm_(of_inner, down.to(rows.dtype)).view(x.shape)
        if needs_down:
            of_down = (of_inner.t() @ _rows(x)).to(down.dtype)
        if needs_up:
            of_up = (rows.t() @ inner).to(up.dtype)
        return of_x, of_down, of_up, None, None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
