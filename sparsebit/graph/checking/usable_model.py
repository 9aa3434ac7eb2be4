"""`require_values`: a model whose tensors hold no values, or whose forward returns none, cannot be compressed."""

from __future__ import annotations

import inspect

from torch import nn
from torch.nn.parameter import is_lazy

from sparsebit.errors import CaptureError


def require_values(model: nn.Module) -> None:
    """Raise if tensors of the model hold no values, or its forward returns none."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    if unmade := [name for name, tensor in tensors if is_lazy(tensor)]:
        raise CaptureError(
            f"the model has lazy layers, whose weights are not there yet ({', '.join(unmade[:3])}); run it once, "
            "model(x), before it is compressed"
        )
    if empty := [name for name, tensor in tensors if tensor.is_meta]:
        more = f" and {len(empty) - 3} more" if len(empty) > 3 else ""
        raise CaptureError(
            f"the model is on the meta device, where tensors have shapes and no values ({', '.join(empty[:3])}{more}); "
            "make it on a real device (without torch.device('meta') or init_empty_weights). For load() its weights do "
            "not matter, but buffers that are not saved do"
        )
    if inspect.iscoroutinefunction(model.forward) or inspect.isasyncgenfunction(model.forward):
        raise CaptureError(
            f"{type(model).__name__}.forward is `async def`: a call returns a coroutine, not values; give a module "
            "whose forward is a plain function"
        )
