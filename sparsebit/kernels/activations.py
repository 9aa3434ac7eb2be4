"""Activation functions that the kernels compute in the same pass as the fake-quant after them.

In two separate ops, both keep their input for the backward; in one pass only the function's input is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsebit.numerics.fake_quant.gradients import Found

_gelu_backward = torch.ops.aten.gelu_backward.default
_silu_backward = torch.ops.aten.silu_backward.default


class Activation(NamedTuple):
    """`number`: its number in the kernels. `gradient`: of the input, from that of the output and the input."""

    number: int
    value: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]


ACTIVATIONS: dict[str, Activation] = {
    "gelu": Activation(1, F.gelu, _gelu_backward),
    "gelu_tanh": Activation(
        2, lambda x: F.gelu(x, approximate="tanh"), lambda grad, x: _gelu_backward(grad, x, approximate="tanh")
    ),
    "silu": Activation(3, F.silu, _silu_backward),
}
_NAMES: dict[Any, str] = {(F.gelu, "none"): "gelu", (F.gelu, "tanh"): "gelu_tanh", (F.silu, None): "silu"}


def with_activation(
    backward: Callable[..., Found],
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    rest: tuple[Any, ...],
    activation: str,
) -> Found:
    """The gradients of x, scale and zero point if `backward` is only that of fake-quant: the function's own
    backward runs in a separate pass.
    """
    if not activation:
        return backward(grad, x, scale, zero_point, *rest)
    function = ACTIVATIONS[activation]
    grad_x, by_scale, by_zero_point = backward(grad, function.value(x), scale, zero_point, *rest)
    return None if grad_x is None else function.gradient(grad_x, x), by_scale, by_zero_point


def name_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The name of the function of a call; `args` without the input. None: another function, or one that works in
    place.
    """
    settings = dict(kwargs)
    settings.pop("input", None)
    if args or settings.pop("inplace", False):
        return None
    approximate = settings.pop("approximate", "none") if function is F.gelu else None
    return None if settings else _NAMES.get((function, approximate))
