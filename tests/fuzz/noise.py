"""The float model with every result rounded a little: what 16 bits may do to it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree

STEP = 2.0**-15


class Noise(TorchFunctionMode):
    """Adds noise of one step of 16 bits to each new tensor that a function makes from tensors, and to what a function
    that works in place reads besides: there a quantizer stands in front of the reader.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if _works_in_place(name):
            args = (*args[:1], *pytree.tree_map_only(Tensor, self._disturbed, args[1:]))
        result = func(*args, **(kwargs or {}))
        if (
            not isinstance(result, Tensor)
            or not result.is_floating_point()
            or name.startswith("__")
            or not result.numel()
        ):
            return result
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        storage = result.untyped_storage().data_ptr()
        if (
            not given
            or any(one.untyped_storage().data_ptr() == storage for one in given)
            or "like" in (resolve_name(func) or "")
        ):
            return result
        with torch._C.DisableTorchFunction():
            return result + self._of(result)

    def _disturbed(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return x + self._of(x) if x.is_floating_point() and x.numel() else x

    def _of(self, x: Tensor) -> Tensor:
        x = x.detach()
        span = (x.max() - x.min().clamp(max=0)).nan_to_num(0, 0, 0)
        noise = torch.rand(x.shape, generator=self.generator, dtype=torch.float32) - 0.5
        return (2 * STEP * span * noise).to(x.dtype)

    def disturb(self, model: nn.Module) -> nn.Module:
        """Noise on the parameters."""
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point() and parameter.numel():
                    parameter.add_(self._of(parameter))
        return model


def _works_in_place(name: str) -> bool:
    """`add_`, `__iadd__`; not `__setitem__`, which only copies."""
    is_operator = name.startswith("__i") and hasattr(operator, name.strip("_")) and name not in ("__index__", "__inv__")
    return is_operator or (name.endswith("_") and not name.endswith("__"))
