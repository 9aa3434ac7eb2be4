"""An activation function and the fake-quant after it as one operator, for compiled graphs (`inductor_fusions`).

Without it, inductor computes the function's backward twice: once for the sum that is a scale's gradient, and once for
the gradient of the input. On a GPU the operator appears to the compiler as the kernels that it launches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsebit.kernels.compilation import show_kernels
from sparsebit.numerics.fake_quant.gradients import LEARNING
from sparsebit.numerics.fake_quant.memory_layout import is_dense
from sparsebit.quantization.speed.below_autograd import gradients_of, quantized

_LIBRARY: Any = torch.library.Library("sparsebit", "FRAGMENT")
_ARGUMENTS = "Tensor x, Tensor scale, Tensor zero_point, int qmin, int qmax, str gradient, str activation"
_LIBRARY.define(f"fake_quantize_activated({_ARGUMENTS}, str tag) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.define(
    f"fake_quantize_activated_backward(Tensor grad, {_ARGUMENTS}, bool[] needs) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


# `settings`: the dispatcher passes the arguments after the tensors one by one, in the order of `_ARGUMENTS`.


def _forward(x: Tensor, scale: Tensor, zero_point: Tensor, *settings: Any, in_graph: bool = False) -> Tensor:
    qmin, qmax, _, activation, tag = settings
    if in_graph and is_dense(x):
        from sparsebit.kernels import fake_quant

        return fake_quant.fake_quantize_in_graph(x, scale, zero_point, qmin, qmax, activation)
    return quantized(x, scale, zero_point, (None, 0, qmin, qmax), x.dtype, tag, activation)


def _backward(
    grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, *settings: Any, in_graph: bool = False
) -> list[Tensor]:
    qmin, qmax, gradient, activation, needs = settings
    if in_graph and is_dense(x):
        from sparsebit.kernels import fake_quant

        return fake_quant.backward_in_graph(grad, x, scale, zero_point, qmin, qmax, needs, activation)
    grid = (None, 0, qmin, qmax)
    found = gradients_of(grad, x, scale, zero_point, grid, gradient, tuple(needs), activation)
    return [needed for needed in found if needed is not None]


def _fake_backward(grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, *rest: Any) -> list[Tensor]:
    return [torch.empty_like(t) for t, needed in zip((x, scale, zero_point), rest[-1], strict=True) if needed]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, qmin, qmax, gradient, activation, _ = inputs
    ctx.save_for_backward(*tensors)
    ctx.rest = (qmin, qmax, gradient, activation)


def _autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    learns = ctx.rest[2] in LEARNING
    needs_x, *of_numbers = ctx.needs_input_grad[:3]
    needs = [needs_x, *(needed and learns for needed in of_numbers)]
    found = iter(torch.ops.sparsebit.fake_quantize_activated_backward(grad, *ctx.saved_tensors, *ctx.rest, needs))
    return (*(next(found) if needed else None for needed in needs), *[None] * 5)


_LIBRARY.impl("fake_quantize_activated", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("fake_quantize_activated_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("sparsebit::fake_quantize_activated", lambda x, *rest: torch.empty_like(x), lib=_LIBRARY)
torch.library.register_fake("sparsebit::fake_quantize_activated_backward", _fake_backward, lib=_LIBRARY)
torch.library.register_autograd("sparsebit::fake_quantize_activated", _autograd, setup_context=_keep, lib=_LIBRARY)


show_kernels(_LIBRARY, "fake_quantize_activated", _forward, x_at=0)
show_kernels(_LIBRARY, "fake_quantize_activated_backward", _backward, x_at=1)
