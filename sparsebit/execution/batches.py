"""Whatever a loader yields -> the arguments of a model's forward."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from sparsebit.errors import CalibrationError

Call = tuple[tuple[Any, ...], dict[str, Any]]


def as_call(batch: Any, model: nn.Module) -> Call:
    """One batch as (args, kwargs).

    A tensor is the one argument; a mapping (a tokenizer's output too) gives keywords; a tuple or list gives positional
    arguments, cut to those that forward requires, so that `(images, labels)` feeds a model of images.
    """
    if isinstance(batch, torch.Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)):
        return tuple(batch)[: _num_required(model, len(batch))], {}
    raise CalibrationError(
        f"a batch of type {type(batch).__name__} cannot be fed to the model; yield a tensor, a tuple of positional "
        "arguments, or a mapping of keyword arguments"
    )


def calls(batches: Iterable[Any], model: nn.Module, device: torch.device | str | None = None) -> Iterator[Call]:
    """Every batch as (args, kwargs), on `device`. A lone tensor or mapping counts as one batch."""
    if isinstance(batches, (torch.Tensor, Mapping)):
        batches = [batches]
    if not isinstance(batches, Iterable):
        raise CalibrationError(f"calibration data of type {type(batches).__name__} is not iterable; pass a DataLoader or a list of batches")
    for batch in batches:
        args, kwargs = as_call(batch, model)
        yield to_device(args, device), to_device(kwargs, device)


def to_device(value: Any, device: torch.device | str | None) -> Any:
    """The same nest of containers with its tensors on `device`."""
    if device is None:
        return value
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)


def _num_required(model: nn.Module, given: int) -> int:
    parameters = inspect.signature(model.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return given
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return max(1, sum(parameter.default is parameter.empty for parameter in positional))
