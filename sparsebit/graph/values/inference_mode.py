"""Ordinary tensors instead of those of `torch.inference_mode()`, which can never take part in a backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from sparsebit.graph.values.copying import copy_model
from sparsebit.graph.values.nested import map_nested, tensors_of


@contextlib.contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Inside, new tensors are ordinary ones, also where `torch.inference_mode()` is on; gradients are off there."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def as_ordinary(value: Any) -> Any:
    """The same nested structure; tensors that were made in inference mode are copied."""
    if not any(tensor.is_inference() for tensor in tensors_of(value)):
        return value
    with ordinary_tensors(), torch.no_grad():
        return map_nested(torch.Tensor, lambda tensor: tensor.clone() if tensor.is_inference() else tensor, value)


def ordinary_model(model: nn.Module) -> nn.Module:
    """`model`, or a copy with ordinary tensors where it has some that were made in inference mode."""
    if not any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers())):
        return model
    return copy_model(model)
