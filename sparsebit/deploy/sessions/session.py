"""`Session`: a model file that is open in a runtime, with one interface for all: arrays by name in, arrays out."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Union

File = Union[str, "os.PathLike[str]", bytes]


class Session(ABC):
    """`inputs` and `outputs` in the file's order; `input_types[name]` is a numpy type's name (`float32`, `int64`…).

    `input_shapes[name]`, `output_shapes[name]`: None for a free dimension.
    """

    runtime: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    input_types: dict[str, str]
    input_shapes: dict[str, tuple[int | None, ...]]
    output_shapes: dict[str, tuple[int | None, ...]]
    largest_batch: int | None = None  # of a free batch; None: any

    @property
    def batch_size(self) -> int | None:
        """The number of samples of a call: the first dimension that the inputs share; None if it is free.

        If they differ in it (a mask or a table next to the samples), the samples are the rows of the first output
        that has as many rows as one of the inputs; if no output has, the number is unknown, and None too.
        """
        sizes = [shape[0] for shape in self.input_shapes.values() if shape]
        if len(set(sizes)) <= 1:
            return next(iter(sizes), None)
        return next((shape[0] for shape in self.output_shapes.values() if shape and shape[0] in sizes), None)

    @abstractmethod
    def run(self, feeds: Mapping[str, Any]) -> list[Any]:
        """One call; the outputs as numpy arrays, in order."""
