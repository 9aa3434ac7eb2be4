"""The user's data as arrays for an ONNX file, in the batch size of the file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from sparsebit.cli.inputs.data import Inputs, load_data
from sparsebit.cli.inputs.loading import LoadingError
from sparsebit.cli.option_groups import DataOptions
from sparsebit.deploy.comparing.file_model import Feeds, as_feeds
from sparsebit.deploy.sessions.session import Session


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


def _sample_inputs(arrays: Feeds, session: Session, size: int | None) -> list[str]:
    """The inputs whose rows may be samples: those with `size` rows in the file, or with any number of rows."""
    shapes = session.input_shapes
    return [name for name, array in arrays.items() if array.ndim and shapes[name] and shapes[name][0] in (size, None)]
