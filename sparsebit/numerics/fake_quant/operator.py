"""`torch.ops.sparsebit.fake_quantize`: the one operator that simulation, training and export share.

`torch.compile`, `torch.export` and the ONNX translation see one opaque node that carries the site's name (`tag`). Its
derivative is an operator too, so that a device's backward kernel survives compilation. Only inductor looks inside
(`decomposed`): fused with its neighbours, fake-quant costs next to nothing.

Three ways lead to the same kernels. `fake_quantize` calls the kernels directly if nothing has to see the operator,
because torch's dispatcher costs as much as a small tensor's arithmetic. Under a mode, compiler or tracer it calls the
operator, so that these see one node. Under `torch.func` the derivative is expressed as a mask, so that any order
and direction of derivatives works. It is registered on the Autograd key by hand, because
`torch.library.register_autograd` does the same at twice the cost.

Every function here takes `x, scale, zero_point, *rest`, with the schema's other arguments in `rest`: axis, group_size,
qmin, qmax, gradient, tag. The backward's are axis, group_size, qmin, qmax, gradient, needs_x, needs_scale,
needs_zero_point.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from sparsebit.errors import SpecError
from sparsebit.numerics import plain
from sparsebit.numerics.fake_quant import decomposed, gradients
from sparsebit.numerics.fake_quant.gradients import GRADIENTS, LEARNING, Found
from sparsebit.numerics.spec import TensorSpec


@dataclass(frozen=True)
class Kernels:
    """One device's implementation: `forward` as `plain.fake_quantize`, `backward` as `gradients.backward`.

    `fuses`: they can fuse more into the same pass. The forward also accepts the type of the result and the name of an
    activation function before it (`sparsebit.kernels.activations`), the backward that name.
    """

    forward: Callable[..., Tensor]
    backward: Callable[..., Found]
    fuses: bool = False


PLAIN = Kernels(plain.fake_quantize, gradients.backward)
KERNELS: dict[str, Kernels] = {}

_LIBRARY: Any = torch.library.Library("sparsebit", "DEF")
_LIBRARY.define(
    "fake_quantize(Tensor x, Tensor scale, Tensor zero_point, int? axis, int group_size, int qmin, int qmax,"
    " str gradient, str tag) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "fake_quantize_backward(Tensor grad, Tensor x, Tensor scale, Tensor zero_point, int? axis, int group_size,"
    " int qmin, int qmax, str gradient, bool needs_x, bool needs_scale, bool needs_zero_point) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
OPERATOR: Callable[..., Tensor] = torch.ops.sparsebit.fake_quantize.default
_fake_quantize_backward = torch.ops.sparsebit.fake_quantize_backward.default
_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})


def fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor, *rest: Any) -> Tensor:
    """The operator. If no compiler, tracer, mode or transform must see it, its functions are called directly.

    Going through torch's dispatcher and back into Python costs as much as the arithmetic on a small tensor.
    """
    if is_intercepted(x, scale, zero_point):
        if is_transformed() and not torch.compiler.is_compiling():
            _needs_grad(x, scale, zero_point, *rest[-2:])  # checks the arguments
            return _transformed(x, scale, zero_point, rest)[0]
        return OPERATOR(x, scale, zero_point, *rest)
    if _needs_grad(x, scale, zero_point, *rest[-2:]):
        return _record(x, scale, zero_point, rest)
    with torch._C._AutoDispatchBelowAutograd():
        return _forward(x, scale, zero_point, *rest)


def kernels_for(x: Tensor) -> Kernels:
    """The kernels registered for the tensor's device, else plain torch."""
    return KERNELS.get("cuda" if x.is_cuda else x.device.type, PLAIN) if KERNELS else PLAIN


def _forward(x: Tensor, scale: Tensor, zero_point: Tensor, *rest: Any) -> Tensor:
    try:
        return kernels_for(x).forward(x, scale, zero_point, *rest[:4])
    except SpecError as error:
        raise SpecError(f"{rest[-1] or 'fake_quantize'}: {error}") from None


def _backward(grad: Tensor, x: Tensor, *rest: Any) -> list[Tensor]:
    return [needed for needed in kernels_for(x).backward(grad, x, *rest) if needed is not None]


def is_exporting() -> bool:
    """Whether `torch.export` traces this. `torch.compiler.is_exporting()` of torch 2.11 is true for every compiler."""
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def _fake_forward(x: Tensor, *rest: Any) -> Tensor:
    if not is_exporting():
        decomposed.register()
    return torch.empty_like(x)


def _fake_backward(grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, *rest: Any) -> list[Tensor]:
    return [torch.empty_like(t) for t, needed in zip((x, scale, zero_point), rest[-3:], strict=True) if needed]


Grid: TypeAlias = tuple[int | None, int, int, int]  # axis, group size, qmin, qmax


def grid_of(spec: TensorSpec) -> Grid:
    return spec.granularity.axis, spec.granularity.size, spec.qmin, spec.qmax


def gradients_of(
    grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid, gradient: str, needs: tuple[bool, ...]
) -> Found:
    """Below autograd: the gradients of x, scale and zero point, if they are needed and learned."""
    if gradient not in LEARNING:
        needs = (needs[0], False, False)
    backward = _backward_by_operator if is_intercepted(grad, x, scale) else kernels_for(x).backward
    return backward(grad, x, scale, zero_point, *grid, gradient, *needs)


def _backward_by_operator(*arguments: Any) -> Found:
    # The needed gradients only: an operator's list of tensors has no room for None.
    found = iter(_fake_quantize_backward(*arguments))
    by_x, by_scale, by_zero_point = (next(found) if needed else None for needed in arguments[-3:])
    return by_x, by_scale, by_zero_point


class _FakeQuantize(torch.autograd.Function):
    """Used when no compiler, tracer, mode or transform is active. `rest` is packed: autograd inspects each argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, rest: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(x, scale, zero_point)
        ctx.rest = rest
        return _forward(x, scale, zero_point, *rest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (_gradients_with_history if torch.is_grad_enabled() else _gradients)(ctx, grad)


class _InterceptedFakeQuantize(_FakeQuantize):
    """Calls the operator again, below autograd, where the active mode or tracer sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, rest: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(x, scale, zero_point)
        ctx.rest = rest
        return below_autograd(x, scale, zero_point, *rest)


class _TransformedFakeQuantize(torch.autograd.Function):
    """For `torch.func` (grad, vmap, jvp, hessian, ...) and forward-mode derivatives: with respect to `x` only.

    The derivative is a constant mask, so that derivatives of any order and direction follow from products with it.
    """

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        """One element after the other: scales of channels and groups keep their axis."""
        tensors, dims = inputs[:3], in_dims[:3]
        found = []
        for index in range(info.batch_size):
            each = (t if dim is None else t.select(dim, index) for t, dim in zip(tensors, dims, strict=True))
            found.append(_transformed(*each, inputs[3]))
        values, masks = zip(*found, strict=True)
        return (torch.stack(values), torch.stack(masks)), (0, 0)

    @staticmethod
    def forward(x: Tensor, scale: Tensor, zero_point: Tensor, rest: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        *grid, gradient, _ = rest
        arguments = (torch.ones_like(x), x, scale, zero_point, *grid, gradient, True, False, False)
        return OPERATOR(x, scale, zero_point, *rest), _fake_quantize_backward(*arguments)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *_, gradient, tag = inputs[3]
        ctx.learns, ctx.tag = gradient in LEARNING, tag
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])
        ctx.save_for_forward(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        _require_x_alone(ctx, any(ctx.needs_input_grad[1:3]))
        (mask,) = ctx.saved_tensors
        return torch.where(mask > 0, grad, 0.0), None, None, None

    @staticmethod
    def jvp(ctx: Any, x: Tensor | None, scale: Tensor | None, zero_point: Tensor | None, _: Any) -> tuple[Any, None]:
        _require_x_alone(ctx, scale is not None or zero_point is not None)
        (mask,) = ctx.saved_tensors
        return torch.zeros_like(mask) if x is None else torch.where(mask > 0, x, 0.0), None


def _require_x_alone(ctx: Any, is_by_numbers: bool) -> None:
    if ctx.learns and is_by_numbers:
        raise SpecError(
            f"{ctx.tag or 'fake_quantize'}: torch.func and forward-mode differentiation differentiate fake-quant by "
            "its input alone, not by a learned scale or zero point; use loss.backward(), or hold the scales with "
            "qmodel.freeze('scales')"
        )


_transformed: Callable[..., tuple[Tensor, Tensor]] = _TransformedFakeQuantize.apply


def is_transformed() -> bool:
    """Whether `torch.func` or forward-mode differentiation is active."""
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, scale, zero_point = ctx.saved_tensors
    *grid, gradient, _ = ctx.rest
    return (*gradients_of(grad, x, scale, zero_point, tuple(grid), gradient, ctx.needs_input_grad[:3]), None)


_gradients_once = once_differentiable(_gradients)


def _gradients_with_history(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients that can be differentiated again: that of `x` is a constant mask times the incoming gradient."""
    if any(ctx.needs_input_grad[1:3]):
        return _gradients_once(ctx, grad)
    x, scale, zero_point = ctx.saved_tensors
    *grid, gradient, _ = ctx.rest
    with torch.no_grad():
        ones = torch.ones_like(x)
        mask = gradients_of(ones, x, scale, zero_point, tuple(grid), gradient, (True, False, False))[0]
    assert mask is not None
    return torch.where(mask > 0, grad, 0.0), None, None, None


# The C function behind `Function.apply`, which first runs Python code for functorch; its transforms never get here.
_record: Callable[..., Tensor] = super(torch.autograd.Function, _FakeQuantize).apply
_record_intercepted: Callable[..., Tensor] = _InterceptedFakeQuantize.apply


def _autograd(x: Tensor, scale: Tensor, zero_point: Tensor, *rest: Any) -> Tensor:
    if not _needs_grad(x, scale, zero_point, *rest[-2:]):
        return below_autograd(x, scale, zero_point, *rest)
    return (_record_intercepted if is_intercepted(x, scale, zero_point) else _record)(x, scale, zero_point, rest)


def below_autograd(x: Tensor, scale: Tensor, zero_point: Tensor, *rest: Any) -> Tensor:
    """The operator without a record for the backward; `rest` as `fake_quantize` takes it."""
    with torch._C._AutoDispatchBelowAutograd():
        return (OPERATOR if is_intercepted(x, scale, zero_point) else _forward)(x, scale, zero_point, *rest)


def _needs_grad(x: Tensor, scale: Tensor, zero_point: Tensor, gradient: str, tag: str) -> bool:
    """Whether autograd must record the call. Also raises for arguments that the operator's schema cannot exclude."""
    if gradient not in GRADIENTS or not x.is_floating_point():
        raise SpecError(
            f"{tag or 'fake_quantize'}: a tensor of {x.dtype}, gradient={gradient!r}: allowed: floating-point tensors, "
            f"{', '.join(GRADIENTS)}"
        )
    if not torch.is_grad_enabled():
        return False
    return x.requires_grad or (gradient in LEARNING and (scale.requires_grad or zero_point.requires_grad))


def is_intercepted(x: Tensor, scale: Tensor, zero_point: Tensor) -> bool:
    """Whether a compiler, mode, transform, tracer or tensor subclass is active that must see the operator."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or is_transformed()
        or torch._C._get_tracing_state() is not None
        or type(x) not in _PLAIN_TYPES
        or type(scale) not in _PLAIN_TYPES
        or type(zero_point) not in _PLAIN_TYPES
    )


_LIBRARY.impl("fake_quantize", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("fake_quantize", _autograd, "Autograd")
_LIBRARY.impl("fake_quantize_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("sparsebit::fake_quantize", _fake_forward, lib=_LIBRARY)
torch.library.register_fake("sparsebit::fake_quantize_backward", _fake_backward, lib=_LIBRARY)
