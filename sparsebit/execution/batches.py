"""Converts batches of any loader to arguments of a model's forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from sparsebit.errors import CalibrationError
from sparsebit.graph.values.inference_mode import as_ordinary
from sparsebit.graph.values.input_hints import input_hint
from sparsebit.graph.values.nested import map_nested, tensors_of

Call = tuple[tuple[Any, ...], dict[str, Any]]


def as_call(batch: Any, model: nn.Module) -> Call:
    """One batch as (args, kwargs).

    A tensor is the only argument. A tuple or list holds positional arguments, cut to those that forward requires, so
    that `(images, labels)` fits a model of images. A mapping (also a tokenizer's output) holds keywords, cut to those
    that forward accepts; if forward requires one argument and the mapping names none, it is that argument.
    """
    if isinstance(batch, torch.Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        return _from_mapping(batch, inspect.signature(model.forward))
    if isinstance(batch, (tuple, list)):
        return tuple(batch)[: _num_required(model, len(batch))], {}
    raise CalibrationError(
        f"a batch of type {type(batch).__name__} cannot be fed to the model; yield a tensor, a tuple of positional "
        f"arguments, or a mapping of keyword arguments{input_hint(batch)}"
    )


def batches_of(data: Any) -> Iterable[Any]:
    """The batches of calibration data. A lone tensor or mapping is one batch."""
    if isinstance(data, (torch.Tensor, Mapping)):
        return [data]
    if not isinstance(data, Iterable):
        raise CalibrationError(
            f"calibration data of type {type(data).__name__} is not iterable; pass a DataLoader or a list of batches"
        )
    return data


def calls(batches: Iterable[Any], model: nn.Module, device: torch.device | str | None = None) -> Iterator[Call]:
    """Every batch as (args, kwargs), copied to `device`, because a model may write into its inputs.

    A lone tensor or mapping counts as one batch.
    """
    for batch in batches_of(batches):
        args, kwargs = map_nested(torch.Tensor, torch.clone, as_ordinary(as_call(batch, model)))
        yield to_device(args, device), to_device(kwargs, device)


def to_device(value: Any, device: torch.device | str | None) -> Any:
    """The same nested structure with its tensors on `device`; tensors from inference mode are copied."""
    value = as_ordinary(value)
    return value if device is None else map_nested(torch.Tensor, lambda tensor: tensor.to(device), value)


def require_repeatable(data: object, reader: str) -> None:
    """An error for data that can be read only once."""
    if isinstance(data, Iterator):
        raise CalibrationError(
            f"{reader} read the calibration data more than once, and an iterator ({type(data).__name__}) yields "
            "it once; pass a list of batches or a DataLoader"
        )


def num_samples(inputs: Any, outputs: Any) -> int:
    """How many samples a batch has: the first dimension that its tensors share; 1 if no tensor has a dimension.

    If the inputs differ in it (one is a mask or a table), the samples are the rows of the first output
    that has as many rows as one of the inputs; if no output has, the whole batch is one sample.

    >>> mask, x = torch.zeros(10, 10), torch.zeros(4, 10, 8)
    >>> num_samples((mask, x), outputs=torch.zeros(4, 3))
    4
    """
    sizes = input_rows(inputs)
    if len(sizes) <= 1:
        return min(sizes, default=1)
    return next((len(tensor) for tensor in tensors_of(outputs) if tensor.ndim and len(tensor) in sizes), 1)


@torch.no_grad()
def num_samples_run(call: Call, run: Callable[..., Any]) -> int:
    """`num_samples` of a call; `run` returns the outputs if its tensors differ in their first dimension."""
    outputs = None
    if len(input_rows(call)) > 1:
        args, kwargs = map_nested(torch.Tensor, torch.clone, call)  # a model may write into its inputs
        outputs = run(*args, **kwargs)
    return num_samples(call, outputs)


def input_rows(inputs: Any) -> set[int]:
    """The distinct first dimensions of the tensors in a batch: for most batches one, the number of samples."""
    return {len(tensor) for tensor in tensors_of(inputs) if tensor.ndim}


def rows_of(value: Any, num_rows: int, start: int, length: int) -> Any:
    """The same nested structure with `length` rows, from `start` on, of each tensor that has `num_rows`."""

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.narrow(0, start, length) if tensor.ndim and len(tensor) == num_rows else tensor

    return value if length == num_rows else map_nested(torch.Tensor, cut, value)


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
