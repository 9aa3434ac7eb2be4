"""Fake-quant of tensors that are stacked in one (the queries, keys and values of one product), each with one scale.

It is one autograd node, whose backward writes the gradient of each part to its place in the whole. Separate nodes would
return tensors that must be put together again, in the memory order of the product. Two faces of the same functions:
`fake_quantize_stacked` for eager training, and the operator `sparsebit::fake_quantize_stacked` for compiled graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparsebit.kernels.compilation import show_kernels
from sparsebit.numerics.fake_quant.gradients import LEARNING
from sparsebit.numerics.fake_quant.memory_layout import stack_form
from sparsebit.quantization.speed.below_autograd import fuses, gradients_of, quantized

Numbers: TypeAlias = Sequence[Tensor]
Gradients: TypeAlias = list[Tensor | None]  # of x, of the scales, of the zero points


class Stack(NamedTuple):
    """All settings that the quantizers share. `tags`: their names, separated by line breaks."""

    dim: int
    qmin: int
    qmax: int
    gradient: str
    tags: str


class _FakeQuantizeStacked(torch.autograd.Function):
    """`numbers`: the scales of all parts, then their zero points."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stack: Stack, *numbers: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *numbers)
        ctx.stack = stack
        ctx.set_materialize_grads(False)
        return tuple(_forward(x, *_halves(numbers), stack))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (_gradients_once if torch.is_grad_enabled() else _gradients)(ctx, *grads)


def _gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    x, *numbers = ctx.saved_tensors
    stack: Stack = ctx.stack
    needs_x, _, *needs = ctx.needs_input_grad
    # A part without a reader has no gradient.
    learns = [grad is not None and stack.gradient in LEARNING for grad in grads]
    needs = [needed and learned for needed, learned in zip(needs, learns * 2, strict=True)]
    each = zip(grads, x.unbind(stack.dim), strict=True)
    known = [torch.zeros_like(piece) if grad is None else grad for grad, piece in each]
    grad_x, *found = _backward(known, x, *_halves(numbers), stack, [needs_x, *needs])
    return (grad_x, None, *found)


_gradients_once = once_differentiable(_gradients)
# Skips a wrapper in Python around `apply`, as `numerics/fake_quant/operator.py` does.
_record: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _FakeQuantizeStacked).apply


def fake_quantize_stacked(x: Tensor, stack: Stack, scales: Numbers, zero_points: Numbers) -> tuple[Tensor, ...]:
    """`x.unbind(stack.dim)`, each part on its own grid. `stack_form(x)` must not be None."""
    return _record(x, stack, *scales, *zero_points)


def _forward(x: Tensor, scales: Numbers, zero_points: Numbers, stack: Stack, *, in_graph: bool = False) -> list[Tensor]:
    dim, qmin, qmax, _, tags = stack
    pieces, form = x.unbind(dim), stack_form(x, dim)
    if form is not None and (in_graph or fuses(x)):
        from sparsebit.kernels import stacked

        return stacked.forward(x, pieces, form, scales, zero_points, qmin, qmax, in_graph=in_graph)
    each = zip(pieces, scales, zero_points, tags.split("\n"), strict=True)
    return [quantized(piece, s, z, (None, 0, qmin, qmax), x.dtype, tag) for piece, s, z, tag in each]


def _backward(
    grads: Sequence[Tensor],
    x: Tensor,
    scales: Numbers,
    zero_points: Numbers,
    stack: Stack,
    needs: Sequence[bool],
    *,
    in_graph: bool = False,
) -> Gradients:
    """The gradients. `needs`: which are needed, of x, of each scale, of each zero point."""
    dim, qmin, qmax, gradient, _ = stack
    pieces, form = x.unbind(dim), stack_form(x, dim)
    needs_x, by_scale, by_zero_point = needs[0], *_halves(needs[1:])
    if form is not None and (in_graph or fuses(x)):
        from sparsebit.kernels import stacked

        some = (needs_x, any(by_scale), any(by_zero_point))
        numbers = (scales, zero_points, qmin, qmax, some)
        grad_x, *sums = stacked.backward(grads, x, pieces, form, *numbers, in_graph=in_graph)
        found = [grad_x]
        for learned, total, params in zip((by_scale, by_zero_point), sums, (scales, zero_points), strict=True):
            found += _totals(total, learned, params, in_graph=in_graph)
        return found
    each = zip(grads, pieces, scales, zero_points, by_scale, by_zero_point, strict=True)
    by_part = [
        gradients_of(grad, piece, s, z, (None, 0, qmin, qmax), gradient, (needs_x, *learned))
        for grad, piece, s, z, *learned in each
    ]
    by_x, *by_numbers = (list(found) for found in zip(*by_part, strict=True))
    grad_x = torch.empty_like(x).copy_(torch.stack(by_x, dim)) if needs_x else None
    return [grad_x, *by_numbers[0], *by_numbers[1]]


def _totals(sums: Tensor | None, needs: Sequence[bool], params: Sequence[Tensor], *, in_graph: bool) -> Gradients:
    """Add up each parameter's row of partial sums; in a graph row by row, so that a compiler finds all of a model's."""
    if sums is None:
        return [None] * len(params)
    totals = [row.sum() for row in sums.unbind(0)] if in_graph else sums.sum(1).unbind(0)
    each = zip(totals, needs, params, strict=True)
    return [total.reshape(param.shape).to(param.dtype) if needed else None for total, needed, param in each]


def _halves(both: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    return both[: len(both) // 2], both[len(both) // 2 :]


# --- the same as an operator, for a compiled graph (`inductor_fusions`); on a GPU the compiler sees its kernels

_LIBRARY: Any = torch.library.Library("sparsebit", "FRAGMENT")
_ARGUMENTS = "Tensor x, Tensor[] scales, Tensor[] zero_points, int dim, int qmin, int qmax, str gradient, str tags"
_LIBRARY.define(f"fake_quantize_stacked({_ARGUMENTS}) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.define(
    f"fake_quantize_stacked_backward(Tensor[] grads, {_ARGUMENTS}, bool[] needs) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _forward_operator(
    x: Tensor, scales: list[Tensor], zero_points: list[Tensor], *stack: Any, in_graph: bool = False
) -> list[Tensor]:
    return _forward(x, scales, zero_points, Stack(*stack), in_graph=in_graph)


def _backward_operator(
    grads: list[Tensor], x: Tensor, scales: list[Tensor], zero_points: list[Tensor], *rest: Any, in_graph: bool = False
) -> list[Tensor]:
    *stack, needs = rest
    found = _backward(grads, x, scales, zero_points, Stack(*stack), needs, in_graph=in_graph)
    return [needed for needed in found if needed is not None]  # an operator's list has no room for None


def _fake_forward(x: Tensor, scales: list[Tensor], zero_points: list[Tensor], dim: int, *rest: Any) -> list[Tensor]:
    return [torch.empty_like(piece) for piece in x.unbind(dim)]


def _fake_backward(grads: list[Tensor], x: Tensor, scales: list[Tensor], zero_points: list[Tensor], *rest: Any) -> Any:
    return [torch.empty_like(t) for t, needed in zip((x, *scales, *zero_points), rest[-1], strict=True) if needed]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, scales, zero_points, *stack = inputs
    ctx.save_for_backward(x, *scales, *zero_points)
    ctx.stack = Stack(*stack)


def _autograd(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    x, *numbers = ctx.saved_tensors
    needs_x, *of_numbers = ctx.needs_input_grad[:3]
    learns = ctx.stack.gradient in LEARNING
    needs = [needs_x, *(needed and learns for half in of_numbers for needed in half)]
    found = iter(torch.ops.sparsebit.fake_quantize_stacked_backward(grads, x, *_halves(numbers), *ctx.stack, needs))
    by_x, *by_numbers = (next(found) if needed else None for needed in needs)
    return (by_x, *map(list, _halves(by_numbers)), *[None] * len(ctx.stack))


_LIBRARY.impl("fake_quantize_stacked", _forward_operator, "CompositeExplicitAutograd")
_LIBRARY.impl("fake_quantize_stacked_backward", _backward_operator, "CompositeExplicitAutograd")
torch.library.register_fake("sparsebit::fake_quantize_stacked", _fake_forward, lib=_LIBRARY)
torch.library.register_fake("sparsebit::fake_quantize_stacked_backward", _fake_backward, lib=_LIBRARY)
torch.library.register_autograd("sparsebit::fake_quantize_stacked", _autograd, setup_context=_keep, lib=_LIBRARY)
show_kernels(_LIBRARY, "fake_quantize_stacked", _forward_operator, x_at=0)
show_kernels(_LIBRARY, "fake_quantize_stacked_backward", _backward_operator, x_at=1)
