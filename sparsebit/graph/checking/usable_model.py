"""`require_values`: raises for models that cannot be compressed: tensors without values, an async forward."""

from __future__ import annotations

import inspect

from torch import nn
from torch.nn.parameter import is_lazy

from sparsebit.errors import CaptureError


def require_values(model: nn.Module) -> None:
    """Raise if tensors of the model have no values (lazy layers, the meta device), or if its forward is async."""
    tensors, fault = (*model.named_parameters(), *model.named_buffers()), ""
    if unmade := [name for name, tensor in tensors if is_lazy(tensor)]:
        fault = f"the model has lazy layers without weights ({', '.join(unmade[:3])}); run it once: model(x)"
    elif empty := [name for name, tensor in tensors if tensor.is_meta]:
        more = f" and {len(empty) - 3} more" if len(empty) > 3 else ""
        fault = (
            f"the model is on the meta device, where tensors have shapes and no values ({', '.join(empty[:3])}{more}); "
            "make it on a real one. For load() its weights do not matter, but buffers that are not saved do"
        )
    elif inspect.iscoroutinefunction(model.forward) or inspect.isasyncgenfunction(model.forward):
        fault = f"{type(model).__name__}.forward is `async def`: give a module whose forward is a plain function"
    if fault:
        raise CaptureError(fault)
