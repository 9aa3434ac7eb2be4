"""Padded positions of a batch of sequences: they are computed but not used, so fits must ignore them."""

from __future__ import annotations

import inspect

from torch import Tensor, nn

from sparsebit.execution.batches import Call

# Names of arguments, and whether True (or 1) is a padded position.
_MASKS = {"attention_mask": False, "key_padding_mask": True, "src_key_padding_mask": True, "padding_mask": True}


def real_positions(call: Call, model: nn.Module) -> Tensor | None:
    """`(batch, length)`: True where a token is real, by the call's mask; None if nothing is padded."""
    try:
        given = inspect.signature(model.forward).bind_partial(*call[0], **call[1]).arguments
    except TypeError:
        return None
    arguments = {**given, **given.get("kwargs", {})}
    for name, is_padded in _MASKS.items():
        mask = arguments.get(name)
        if isinstance(mask, Tensor) and mask.dim() == 2 and bool(((mask == 0) | (mask == 1)).all()):
            real = (mask != 0) ^ is_padded
            return None if bool(real.all()) or not bool(real.any()) else real
    return None


def real_rows(x: Tensor, real: Tensor | None) -> Tensor:
    """The rows of `x (batch, length, ...)` or `(batch * length, channels)` that are real; others as they are."""
    if real is None:
        return x
    if x.dim() > 2 and x.shape[:2] == real.shape:
        return x[real.to(x.device)]
    if x.dim() == 2 and len(x) == real.numel():
        return x[real.flatten().to(x.device)]
    return x
