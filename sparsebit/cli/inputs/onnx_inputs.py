"""Runs an ONNX file on batches of data: arrays in its batch size, and the file as a callable model."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsebit.cli.inputs.data import Inputs, load_data
from sparsebit.cli.inputs.loading import LoadingError
from sparsebit.cli.option_groups import DataOptions
from sparsebit.deploy.comparing.check import runtime_of
from sparsebit.deploy.exporting.to_onnx import flat_inputs, in_order
from sparsebit.deploy.onnx_graph.packages import numpy
from sparsebit.deploy.sessions.runtime_sessions import Session, open_session

Feeds = dict[str, Any]


class FileData:
    """The user's data in the form that one file needs, made when the file is open; `description` is set then."""

    def __init__(self, data: str, options: DataOptions, file: str) -> None:
        self.data, self.options, self.file = data, options, file
        self.description = data

    def __call__(self, session: Session, batch_size: int | None) -> Iterator[Feeds]:
        source = load_data(self.data, self.options, inputs_of(session, self.file))
        self.description = source.description
        return feeds(source.tracked("comparing"), session, self.file, batch_size)


def inputs_of(session: Session, file: str) -> Inputs:
    """The inputs of the file."""
    takes_bytes = "uint8" in session.input_types.values()
    return Inputs(session.inputs, f"inputs of {file}", in_order=True, takes_bytes=takes_bytes)


def feeds(data: Iterable[Any], session: Session, file: str, size: int | None) -> Iterator[Feeds]:
    """Numpy arrays by input name: batch by batch, or split into `size` samples, the fixed batch size of the file."""
    for batch in data:
        arrays = as_feeds(batch, session, file)
        samples = _sample_inputs(arrays, session, size)
        given = next((len(arrays[name]) for name in samples if len(arrays[name]) != size), size)
        if size is None or given is None or size == given:
            yield arrays
            continue
        if given < size:
            hint = f"give --batch-size {size} and as many samples, or export the file with a dynamic batch"
            raise LoadingError(f"{file} takes {size} samples at once, and a batch of the data has {given}; {hint}")
        split = [name for name in samples if len(arrays[name]) == given]
        for start in range(0, given - size + 1, size):
            yield {**arrays, **{name: arrays[name][start : start + size] for name in split}}


def as_feeds(batch: Any, session: Session, file: str) -> Feeds:
    """One batch: a mapping holds inputs by name; a tensor or a tuple of tensors is matched to the inputs in order.

    A tuple may be longer than the inputs, so that `(images, labels)` fits a file of images.
    """
    names = session.inputs
    if isinstance(batch, Mapping) and any(name in batch for name in names):
        if missing := [name for name in names if name not in batch]:
            raise LoadingError(f"{file} takes {', '.join(names)}; the data has no {', '.join(missing)}")
        chosen = [batch[name] for name in names]
    else:
        chosen = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) or _is_array(leaf)]
        if len(chosen) < len(names) or (isinstance(batch, Mapping) and len(chosen) > len(names)):
            wanted = f"{len(names)} inputs ({', '.join(names)})"
            raise LoadingError(f"{file} takes {wanted}; a batch of the data holds {len(chosen)} arrays")
    pairs = zip(names, chosen[: len(names)], strict=True)
    return {name: _typed(value, session.input_types[name], name, file) for name, value in pairs}


def _typed(value: Any, kind: str, name: str, file: str) -> Any:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()  # numpy knows no bfloat16
    if value.dtype.kind == "f" and not kind.startswith(("float", "bfloat")):
        raise LoadingError(f"{file}: input {name} is of type {kind}, the data of type {value.dtype}")
    return numpy.ascontiguousarray(value.astype(kind, copy=False))


def _sample_inputs(arrays: Feeds, session: Session, size: int | None) -> list[str]:
    """The inputs whose rows may be samples: those with `size` rows in the file, or with any number of rows."""
    shapes = session.input_shapes
    return [name for name, array in arrays.items() if array.ndim and shapes[name] and shapes[name][0] in (size, None)]


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "shape")


class FileModel(nn.Module):
    """Runs the file in the same session as users do, in the file's batch size.

    `signature`: the signature of the model's forward if keywords are named as its parameters; otherwise they are named
    as the file's inputs.
    """

    def __init__(self, file: Path, runtime: str | None = None, signature: inspect.Signature | None = None) -> None:
        super().__init__()
        self.file, self.signature = file, signature
        self.session = open_session(file, runtime or runtime_of(file))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs as tensors: the only one, or a tuple of them in the file's order."""
        if self.signature is not None:
            args, kwargs = tuple(flat_inputs(args, in_order(kwargs, self.signature))), {}
        feeds = as_feeds(kwargs or args, self.session, str(self.file))
        size, shapes = self.session.batch_size, self.session.input_shapes
        counts = {name: len(feeds[name]) for name, shape in shapes.items() if shape and shape[0] in (size, None)}
        count = max(counts.values(), default=0)
        if size is None or count in (0, size):
            return _outputs(self.session.run(feeds))
        rows = {name for name, number in counts.items() if number == count}
        parts = []
        for start in range(0, count, size):
            places = [min(place, count - 1) for place in range(start, start + size)]  # the last sample pads the piece
            parts.append(self.session.run({k: v[places] if k in rows else v for k, v in feeds.items()}))
        return _outputs([_joined([part[place] for part in parts], size, count) for place in range(len(parts[0]))])


def _joined(parts: list[Any], size: int, count: int) -> Any:
    """The outputs of single runs concatenated, without those of the padding samples."""
    return parts[0] if not parts[0].ndim or len(parts[0]) != size else numpy.concatenate(parts)[:count]


def _outputs(arrays: list[Any]) -> Any:
    tensors: list[Tensor] = [torch.from_numpy(array.copy()) for array in arrays]
    return tensors[0] if len(tensors) == 1 else tuple(tensors)
