"""Activation functions that a kernel computes on its way to the quantizer behind them, not in a pass of their own.

They keep their input for the backward, and so does the quantizer its own: in one pass the second need not be kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_gelu_backward = torch.ops.aten.gelu_backward.default
_silu_backward = torch.ops.aten.silu_backward.default


class Activation(NamedTuple):
    """`number`: what kernels call it. `gradient`: of the input, from that of the output and the input."""

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
_NAMES: dict[Any, str] = {
    (F.gelu, "none"): "gelu",
    (F.gelu, "tanh"): "gelu_tanh",
    (F.silu, None): "silu",
}


def name_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Which one a call is; `args` without the input. None: none of them, or one that works in place."""
    settings = dict(kwargs)
    settings.pop("input", None)
    if args or settings.pop("inplace", False):
        return None
    approximate = settings.pop("approximate", "none") if function is F.gelu else None
    return None if settings else _NAMES.get((function, approximate))
