"""`may_fuse`: whether a fused step may replace a quantizer and the modules around it, with every reason against it.

A fused step computes the same as the plain modules. It may replace them only if no other code runs with them and
none sees the values in between. Hooks and switches may be set at any time, so the reasons are checked at every call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.quantization.ops.layer_call import is_hooked
from sparsebit.quantization.quantizers.base import Quantizer, has_our_methods, reads_copies

# Methods that define the computation of a quantizer's forward.
_METHODS = ("forward", "fake_quantize", "transform", "is_enable", "__call__")
_ON_INSTANCES = ("fake_quantize", "transform", "operands", "GRADIENT")


class Substitute:
    """A `forward` that replaces a module's own and computes the same.

    It is set on the module's instance, so names, hooks and the state_dict do not change.
    """

    forward: Callable[..., Any]


def substitute(module: nn.Module, by: Substitute) -> None:
    """Replace the module's forward by this one's, unless a user has set a forward there."""
    if not has_own_forward(module):
        module.__dict__["forward"] = by.forward


def substitute_of(module: nn.Module) -> Substitute | None:
    """The replacement of the module's forward, if there is one."""
    found = getattr(module.__dict__.get("forward"), "__self__", None)
    return found if isinstance(found, Substitute) else None


def restore(module: nn.Module) -> None:
    """Restore the module's own forward."""
    if substitute_of(module) is not None:
        del module.__dict__["forward"]


def has_own_forward(module: nn.Module) -> bool:
    """Whether a user has set a forward on the instance."""
    return "forward" in module.__dict__ and substitute_of(module) is None


def runs_user_code(module: nn.Module) -> bool:
    """Whether a call of the module runs a user's code: a hook, a forward of the instance, or a separate compiler."""
    return is_hooked(module) or has_own_forward(module) or module._compiled_call_impl is not None


def _quantizer_runs_user_code(quantizer: Quantizer) -> bool:
    """`runs_user_code` for a quantizer; this package's own hook (`read_copies`) does not count."""
    if not reads_copies(quantizer):
        return runs_user_code(quantizer)
    others = (quantizer._forward_hooks, quantizer._backward_hooks, quantizer._backward_pre_hooks)
    has_others = len(quantizer._forward_pre_hooks) > 1 or any(others)
    return has_others or has_own_forward(quantizer) or quantizer._compiled_call_impl is not None


def rounds_otherwise(quantizer: Quantizer) -> bool:
    """Whether its forward differs from the operator on `operands()`."""
    kind: Any = type(quantizer)
    has_own = any(name in quantizer.__dict__ for name in _ON_INSTANCES)
    return has_own or quantizer.spec.format != "integer" or not _rounds_as_base(kind)


_ROUND_AS_BASE: dict[Any, bool] = {}  # by class; a compiler can read a dict, but not compare methods


def _rounds_as_base(kind: Any) -> bool:
    if kind not in _ROUND_AS_BASE:
        _ROUND_AS_BASE[kind] = all(getattr(kind, method) is getattr(Quantizer, method) for method in _METHODS)
    return _ROUND_AS_BASE[kind]


def is_deterministic(quantizer: Quantizer) -> bool:
    """Whether equal inputs have equal outputs: no random numbers, and no range that follows the data."""
    return not quantizer.follows and has_our_methods(quantizer, "fake_quantize", "operands", "qparams", "transform")


Reason = Callable[[Quantizer, tuple[nn.Module, ...], Any], bool]
# In the order of their cost, the cheapest first.
REASONS: dict[str, Reason] = {
    "no gradients are recorded": lambda quantizer, modules, x: not torch.is_grad_enabled(),
    "the input is no floating-point tensor": lambda quantizer, modules, x: (
        not isinstance(x, Tensor) or not x.is_floating_point()
    ),
    "a part is in eval mode": lambda quantizer, modules, x: not all(module.training for module in modules),
    "the quantizer is off": lambda quantizer, modules, x: not quantizer.is_enable,
    "the quantizer observes its input, or its range follows it": lambda quantizer, modules, x: (
        quantizer.observing or quantizer.follows
    ),
    "the quantizer rounds otherwise": lambda quantizer, modules, x: rounds_otherwise(quantizer),
    # Replicas share their references (`Substitute`, quantizers in tuples) with the original module.
    "a part is a DataParallel copy": lambda quantizer, modules, x: any("_is_replica" in m.__dict__ for m in modules),
    "a hook, a forward of its own or a compiler sees a part": lambda quantizer, modules, x: (
        any(map(runs_user_code, modules)) or _quantizer_runs_user_code(quantizer)
    ),
}


def may_fuse(quantizer: Quantizer, modules: tuple[nn.Module, ...], x: Any) -> bool:
    """Whether `x`, `modules` and `quantizer` may be computed in one step: none of the reasons holds."""
    for holds in REASONS.values():  # noqa: SIM110 - a loop, because a compiler traces it
        if holds(quantizer, modules, x):
            return False
    return True
