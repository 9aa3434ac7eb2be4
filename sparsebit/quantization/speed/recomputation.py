"""`Recompute`: how to recompute a tensor. Autograd saves it instead of the tensor.

`attach_recompute` stores a function and its arguments on an output tensor. While `packing()` is active, autograd's
hooks for saved tensors (`_pack`) save that object instead of the values, and `_unpack` runs it in the backward.
`saved_activations.py` and `fused_layer.py` decide which outputs get one.

The invariant: recomputed values equal the dropped ones bit for bit. So the function must be deterministic, autocast
must be as in the forward, and nothing that it reads may have changed; versions are compared, and a change raises.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsebit.errors import SparsebitError

_ATTRIBUTE = "_sparsebit_recompute"
_NOTHING = contextlib.nullcontext()
_CHANGED = (
    "a tensor that the backward needs again was changed in place (by an optimizer's step before the backward?); "
    "change a copy of it, or keep everything with pack_saved_activations(False)"
)


class Recompute:
    """A function and its arguments, some of which are recomputed themselves.

    `read`: tensors that the function reads besides its arguments; their versions are compared, too.
    """

    def __init__(
        self,
        output: Tensor,
        function: Callable[..., Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        read: tuple[Tensor, ...],
        *,
        autocasts: bool,
    ) -> None:
        self.num_readers = 0
        self.value: Tensor | None = None
        self.version = output._version
        self.function = function
        # Detached from their history: this object must not keep the autograd graph alive.
        self.args = [_without_history(arg) for arg in args]
        self.kwargs = {name: _without_history(arg) for name, arg in kwargs.items()}
        self.watched: list[Tensor] = list(read)
        for arg in (*self.args, *self.kwargs.values()):
            if isinstance(arg, Recompute):
                arg.num_readers += 1
            elif isinstance(arg, Tensor):
                self.watched.append(arg)
        self.versions = [tensor._version for tensor in self.watched]
        self.autocast: dict[str, Any] | None = None
        if autocasts:
            kind = output.device.type
            dtype, is_on = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
            self.autocast = {"device_type": kind, "dtype": dtype, "enabled": is_on, "cache_enabled": False}

    def read(self) -> Tensor:
        """The tensor, which is computed for the first reader, and released after the last one that packed it."""
        self.num_readers -= 1
        value = self.value if self.value is not None else self._computed()
        self.value = value if self.num_readers > 0 else None
        return value

    def _computed(self) -> Tensor:
        if self.versions != [tensor._version for tensor in self.watched]:
            raise SparsebitError(_CHANGED)
        args = [_unpack(arg) for arg in self.args]
        kwargs = {name: _unpack(arg) for name, arg in self.kwargs.items()}
        if self.autocast is None and not torch.is_grad_enabled():  # the usual case: skips the context managers
            return self.function(*args, **kwargs)
        with torch.no_grad(), _NOTHING if self.autocast is None else torch.autocast(**self.autocast):
            return self.function(*args, **kwargs)


def attach_recompute(
    output: Tensor,
    function: Callable[..., Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    read: tuple[Tensor, ...] = (),
    *,
    autocasts: bool = True,
) -> None:
    """`autocasts`: whether the function's dtypes depend on autocast; `read`: tensors it reads besides its arguments."""
    setattr(output, _ATTRIBUTE, Recompute(output, function, args, kwargs or {}, read, autocasts=autocasts))


def recompute_of(tensor: Any) -> Recompute | None:
    """How to recompute a tensor; None if it has no recompute function, or has been changed in place."""
    found: Recompute | None = getattr(tensor, _ATTRIBUTE, None)
    return found if found is not None and found.version == tensor._version else None


def as_autocast(x: Tensor) -> Tensor:
    """A float32 tensor in the dtype that autocast would convert it to; the result can be recomputed, too."""
    dtype = autocast_dtype(x.device.type)
    if x.dtype != torch.float32 or dtype is None:
        return x
    half = x.to(dtype)
    attach_recompute(half, torch.Tensor.to, (x, dtype), autocasts=False)
    return half


# Computed once: a compiler cannot trace this check.
_WITH_AUTOCAST = frozenset(filter(torch.amp.is_autocast_available, ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")))


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The type of a layer's tensors under autocast, if it is on."""
    if device_type not in _WITH_AUTOCAST or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def relu(input: Tensor, inplace: bool = False) -> Tensor:
    """ReLU saves its output. If its input is recomputed, use a threshold, which saves its input instead."""
    return F.threshold(input, 0.0, 0.0) if recompute_of(input) is not None else F.relu(input)


def packing() -> torch.autograd.graph.saved_tensors_hooks:
    """Inside, autograd saves the recompute function of a tensor that has one, else the tensor."""
    return _PACKING


@dataclass(frozen=True)
class View:
    """A view of a recomputed tensor: a linear layer saves its input as a matrix, whatever its dimensions were."""

    base: Recompute
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def read(self) -> Tensor:
        return self.base.read().as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True)
class Kept:
    """A tensor that is kept, with its version: torch does not compare versions of what pack hooks return."""

    tensor: Tensor
    version: int

    def read(self) -> Tensor:
        if self.tensor._version != self.version:
            raise SparsebitError(_CHANGED)
        return self.tensor


def _pack(tensor: Tensor) -> Recompute | View | Kept:
    recompute = recompute_of(tensor)
    if recompute is not None:
        recompute.num_readers += 1
        return recompute
    recompute = recompute_of(tensor._base)  # None for a tensor that is not a view
    if recompute is None:
        # Detached, because an op that saves its own output would otherwise keep itself alive in a reference cycle.
        return Kept(tensor if tensor.grad_fn is None else tensor.detach(), tensor._version)
    recompute.num_readers += 1
    return View(recompute, tensor.shape, tensor.stride(), int(tensor.storage_offset()))


def _unpack(kept: Any) -> Any:
    return kept.read() if isinstance(kept, Recompute | View | Kept) else kept


_PACKING = torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)


def _without_history(arg: Any) -> Any:
    if not isinstance(arg, Tensor):
        return arg
    return recompute_of(arg) or (arg if arg.grad_fn is None else arg.detach())
