"""Finds, during a trace, code that no graph can represent; its module then runs its own code.

Such code is: random numbers and writes that run on real tensors during the trace, parameters that are read without an
attribute access, gradient and autocast modes, functions with their own backward, seeds.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from sparsebit.graph.tracing.patched_torch import holds_proxy, patch
from sparsebit.graph.values.nested import storage_of

_TORCH = os.path.dirname(torch.__file__) + os.sep
_MODES: tuple[tuple[Any, str, str], ...] = (
    (torch.no_grad, "__enter__", "torch.no_grad()"),
    (torch.enable_grad, "__enter__", "torch.enable_grad()"),
    (torch.set_grad_enabled, "__init__", "torch.set_grad_enabled()"),
    (torch.inference_mode, "__enter__", "torch.inference_mode()"),
    (torch.amp.autocast_mode.autocast, "__enter__", "torch.autocast()"),
)
_QUESTIONS = (
    "is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "is_autocast_cpu_enabled",
    "get_autocast_dtype", "get_autocast_gpu_dtype", "get_autocast_cpu_dtype", "get_default_dtype",
)  # fmt: skip
_SEEDS = ("manual_seed", "seed", "initial_seed", "set_rng_state", "get_rng_state")


class ConcreteOps(TorchDispatchMode):
    """Sees every op that runs on tensors, not on traced values, while `tracer` traces."""

    def __init__(self, tracer: Any, root: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracer = tracer
        self.weights = {storage_of(tensor) for tensor in (*root.parameters(), *root.buffers())}
        self.made: dict[int, torch.Tensor] = {}  # kept alive, so that no other storage gets their number

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.tracer.is_evaluating:
            return func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.tracer.refuse(f"{func.overloadpacket}: random numbers that a graph would draw only once")
        arguments = func._schema.arguments
        given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
        for argument in arguments:
            for tensor in _tensors_in(given.get(argument.name)):
                self._check(func, tensor, argument.alias_info is not None and argument.alias_info.is_write)
        output = func(*args, **kwargs)
        known = {storage_of(tensor) for tensor in _tensors_in((args, kwargs))}
        for tensor in _tensors_in(output):
            if storage_of(tensor) not in known:  # neither an argument nor a view of one
                self.made.setdefault(storage_of(tensor), tensor)
        return output

    def _check(self, func: Any, tensor: torch.Tensor, is_write: bool) -> None:
        storage = storage_of(tensor)
        if storage in self.weights and not func.is_view:
            self.tracer.refuse(f"{func.overloadpacket} on a parameter or buffer that is not read as an attribute")
        if is_write and storage not in self.made:
            self.tracer.refuse(f"{func.overloadpacket}: writes into a tensor that outlives the call")


@contextlib.contextmanager
def watched(tracer: Any, root: nn.Module) -> Iterator[None]:
    """Inside, `tracer.refuse` is called where the model's code does something that no graph can represent."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in {torch._C._get_accelerator().type, "cpu"} if torch.accelerator.is_available() else {"cpu"}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        _patch_all(tracer, stack)
        stack.enter_context(ConcreteOps(tracer, root))
        yield


def has_hooks(module: nn.Module) -> bool:
    """Whether the module, or every module, has hooks: their side effects (counting, storing) are not in the graph."""
    kinds = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    everywhere = torch.nn.modules.module
    return any(getattr(module, f"_{kind}") or getattr(everywhere, f"_global_{kind}") for kind in kinds)


def _patch_all(tracer: Any, stack: contextlib.ExitStack) -> None:
    for owner, method, name in _MODES:
        patch(stack, owner, method, _refusing(tracer, getattr(owner, method), f"computes under {name}"))
    saving = torch.autograd.graph.saved_tensors_hooks  # checkpoints of torch use them too, to the same effect
    reason = "computes under torch.autograd.graph.saved_tensors_hooks()"
    patch(stack, saving, "__enter__", _refusing(tracer, saving.__enter__, reason, users_only=True))
    for name in _QUESTIONS:
        reason = f"asks torch.{name}(): the answer may differ from call to call"
        patch(stack, torch, name, _refusing(tracer, getattr(torch, name), reason, users_only=True))
    for module in (torch, torch.random):
        for name in _SEEDS:
            patch(stack, module, name, _refusing(tracer, getattr(module, name), f"calls torch.{name}()"))
    unwrap = torch._functorch.utils.unwrap_dead_wrappers

    def unwrap_or_refuse(args: tuple[Any, ...]) -> Any:
        """Called by `autograd.Function.apply`, also by one that was bound before the trace."""
        if tracer.is_tracing_here() and holds_proxy(args):
            function = sys._getframe(1).f_locals.get("cls", torch.autograd.Function)
            tracer.refuse(f"calls the autograd.Function {function.__name__}, which has a backward of its own")
        return unwrap(args)

    patch(stack, torch._functorch.utils, "unwrap_dead_wrappers", unwrap_or_refuse)


def _refusing(tracer: Any, original: Callable[..., Any], reason: str, users_only: bool = False) -> Callable[..., Any]:
    def refuse_or_call(*args: Any, **kwargs: Any) -> Any:
        asks_itself = users_only and sys._getframe(1).f_code.co_filename.startswith(_TORCH)
        if tracer.is_tracing_here() and not asks_itself:
            tracer.refuse(reason)
        return original(*args, **kwargs)

    return refuse_or_call


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
