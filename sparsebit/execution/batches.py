"""Batches of any loader -> the arguments of a model's forward."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from sparsebit.errors import CalibrationError
from sparsebit.graph.nested import map_nested

Call = tuple[tuple[Any, ...], dict[str, Any]]


def as_call(batch: Any, model: nn.Module) -> Call:
    """One batch as (args, kwargs).

    A tensor is the one argument. A tuple or list gives positional arguments, cut to those that forward requires, so
    that `(images, labels)` feeds a model of images. A mapping (a tokenizer's output too) gives keywords, cut to those
    that forward takes; where it names none of them and forward requires one argument, it is that argument.
    """
    if isinstance(batch, torch.Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        return _from_mapping(batch, inspect.signature(model.forward))
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
        raise CalibrationError(
            f"calibration data of type {type(batches).__name__} is not iterable; pass a DataLoader or a list of batches"
        )
    for batch in batches:
        args, kwargs = as_call(batch, model)
        yield to_device(args, device), to_device(kwargs, device)


def to_device(value: Any, device: torch.device | str | None) -> Any:
    """The same nested structure with its tensors on `device`."""
    return value if device is None else map_nested(torch.Tensor, lambda tensor: tensor.to(device), value)


def _from_mapping(batch: Mapping[Any, Any], signature: inspect.Signature) -> Call:
    parameters = signature.parameters.values()
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return (), dict(batch)
    kept = {key: value for key, value in batch.items() if key in names}
    if not kept and len(_required(signature)) == 1:
        return (batch,), {}
    return (), kept or dict(batch)


def _num_required(model: nn.Module, given: int) -> int:
    try:
        signature = inspect.signature(model.forward)
    except ValueError:  # compiled code has no Python signature
        return given
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in signature.parameters.values()):
        return given
    return max(1, len(_required(signature)))


def _required(signature: inspect.Signature) -> list[str]:
    positional = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [parameter.name for parameter in positional if parameter.default is parameter.empty]
