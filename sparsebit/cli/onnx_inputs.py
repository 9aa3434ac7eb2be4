"""Batches of data -> the arrays that an ONNX file's inputs take, in the batch size that it takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from sparsebit.cli.data import Inputs, load_data
from sparsebit.cli.loading import LoadingError
from sparsebit.cli.option_groups import DataOptions
from sparsebit.deploy.sessions import Session

Feeds = dict[str, Any]


class FileData:
    """The user's data as one file takes it: made when the file is open. `description`: in words, once it is made."""

    def __init__(self, data: str, options: DataOptions, file: str) -> None:
        self.data, self.options, self.file = data, options, file
        self.description = data

    def __call__(self, session: Session, batch_size: int | None) -> Iterator[Feeds]:
        takes_bytes = "uint8" in session.input_types.values()
        inputs = Inputs(session.inputs, f"input of {self.file}", in_order=True, takes_bytes=takes_bytes)
        source = load_data(self.data, self.options, inputs)
        self.description = source.description
        return feeds(source, session, self.file, batch_size)


def feeds(data: Iterable[Any], session: Session, file: str, size: int | None) -> Iterator[Feeds]:
    """Numpy arrays by input name: batch by batch, or cut into pieces of `size` samples, the fixed batch of the file."""
    for batch in data:
        arrays = as_feeds(batch, session, file)
        samples = _sample_inputs(arrays, session, size)
        given = next((len(arrays[name]) for name in samples if len(arrays[name]) != size), size)
        if size is None or given is None or size == given:
            yield arrays
            continue
        if given < size:
            raise LoadingError(f"{file} takes {size} samples at once, and a batch of the data has {given}{_hint(size)}")
        for start in range(0, given - size + 1, size):
            yield {
                name: array[start : start + size] if name in samples and len(array) == given else array
                for name, array in arrays.items()
            }


def as_feeds(batch: Any, session: Session, file: str) -> Feeds:
    """One batch: a mapping gives inputs by name; its tensors, or those of a tuple, go to the inputs in order.

    A tuple may hold more than the file takes, so that `(images, labels)` feeds a file of images.
    """
    names = session.inputs
    if isinstance(batch, Mapping) and any(name in batch for name in names):
        missing = [name for name in names if name not in batch]
        if missing:
            raise LoadingError(f"{file} takes {', '.join(names)}; the data has no {', '.join(missing)}")
        chosen = [batch[name] for name in names]
    else:
        chosen = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) or _is_array(leaf)]
        if len(chosen) < len(names) or (isinstance(batch, Mapping) and len(chosen) > len(names)):
            raise LoadingError(
                f"{file} takes {len(names)} inputs ({', '.join(names)}); a batch of the data holds {len(chosen)} arrays"
            )
    return {
        name: _typed(value, session.input_types[name], name, file)
        for name, value in zip(names, chosen[: len(names)], strict=True)
    }


def _typed(value: Any, kind: str, name: str, file: str) -> Any:
    import numpy

    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()  # numpy knows no bfloat16
    if value.dtype.kind == "f" and not kind.startswith(("float", "bfloat")):
        raise LoadingError(f"{file}: input {name} is of type {kind}, the data of type {value.dtype}")
    return numpy.ascontiguousarray(value.astype(kind, copy=False))


def _sample_inputs(arrays: Feeds, session: Session, size: int | None) -> list[str]:
    """The inputs whose rows may be samples: those that have `size` rows in the file, or any number of them."""
    shapes = session.input_shapes
    return [name for name, array in arrays.items() if array.ndim and shapes[name] and shapes[name][0] in (size, None)]


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "shape")


def _hint(size: int) -> str:
    return f"; give --batch-size {size} and as many samples, or export the file with a dynamic batch"
