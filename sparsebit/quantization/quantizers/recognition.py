"""What others may rely on in a quantizer: a user's own may do anything, and hooks may change what it gives."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from sparsebit.quantization.quantizers.base import Quantizer


def is_known(quantizer: Quantizer) -> bool:
    """Whether it rounds with the one operator behind `transform`, as ours do."""
    return _are_ours(_kind(quantizer), ("fake_quantize", "operands"))


def repeats(quantizer: Quantizer) -> bool:
    """Whether it gives the same for the same again: it draws nothing at random, and its range follows no data."""
    return not quantizer.follows and _are_ours(_kind(quantizer), ("fake_quantize", "operands", "qparams", "transform"))


def is_operator_alone(quantizer: Quantizer) -> bool:
    """Whether a forward, now, is the operator on `operands()` and nothing else, so that others may call that."""
    return bool(quantizer.shortcut) and "forward" not in quantizer.__dict__ and not is_hooked(quantizer)


def is_hooked(module: nn.Module, besides: Callable[..., Any] | None = None) -> bool:
    """Whether a call of the module runs more than its forward and the hook `besides`."""
    forward_hooks = module._forward_hooks
    if forward_hooks and any(hook is not besides for hook in forward_hooks.values()):
        return True
    own = module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(own) or bool(_has_any_global_hook())


def is_watched(reader: nn.Module) -> bool:
    """Whether something besides the reader's own forward sees its input: a hook on it or on its op, a forward that a
    user gave it, or a compiler of its own, which does not see what is handed over.
    """
    op = reader._modules.get("op")
    has_own = reader._compiled_call_impl is not None or "forward" in reader.__dict__
    return has_own or is_hooked(reader) or (op is not None and is_hooked(op))


def is_replica(module: nn.Module) -> bool:
    """Whether it is `nn.DataParallel`'s copy, whose references to other modules are to those of the original."""
    return "_is_replica" in module.__dict__


def _kind(quantizer: Quantizer) -> Any:
    return type(quantizer)


@lru_cache(maxsize=256)
def _are_ours(kind: Any, methods: tuple[str, ...]) -> bool:
    return all(getattr(kind, method).__module__.startswith("sparsebit.") for method in methods)
