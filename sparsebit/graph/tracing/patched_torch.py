"""Patches of torch that are active while a trace runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

# Functions of sizes and types, not of tensors, so that torch.fx does not trace them by itself.
_FACTORIES = ("arange", "zeros", "ones", "full", "empty", "linspace", "eye", "tensor", "as_tensor", "finfo", "iinfo")
# Always traced, also without a traced argument, because every call must draw new numbers.
_RANDOM_FACTORIES = (
    "rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson", "rand_like", "randn_like",
    "randint_like",
)  # fmt: skip
# A trace patches torch and the model's Python modules for the whole process: one at a time.
TRACING = threading.RLock()


@contextlib.contextmanager
def unfused_attention() -> Iterator[None]:
    """Inside, torch's encoder layers do not test for their fused kernel, since a trace cannot follow that test."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


@contextlib.contextmanager
def traced_factories(tracer: Any) -> Iterator[None]:
    """Inside, factories called with traced values, and random ones always, become nodes of the tracer's graph."""
    torch.overrides.get_overridable_functions()  # torch lists its functions once: before some are patched

    def wrap(factory: Callable[..., Any]) -> Callable[..., Any]:
        is_random = factory.__name__ in _RANDOM_FACTORIES

        def traced(*args: Any, **kwargs: Any) -> Any:
            if tracer.is_tracing_here() and (is_random or holds_proxy((args, kwargs))):
                return tracer.create_proxy("call_function", factory, args, kwargs)
            return factory(*args, **kwargs)

        return traced

    with contextlib.ExitStack() as stack:
        for name in (*_FACTORIES, *_RANDOM_FACTORIES):
            patch(stack, torch, name, wrap(getattr(torch, name)))
        yield


def patch(stack: contextlib.ExitStack, owner: Any, name: str, replacement: Any) -> None:
    """Replace an attribute until the stack is closed."""
    stack.callback(setattr, owner, name, owner.__dict__[name])
    setattr(owner, name, replacement)


def holds_proxy(value: Any) -> bool:
    """Whether a traced value is in the nested structure."""
    return any(isinstance(leaf, fx.Proxy) for leaf in pytree.tree_leaves(value))
