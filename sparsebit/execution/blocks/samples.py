"""`BlockSamples`: mini-batches of a block's inputs and targets, drawn from the store without loading all of it.

Stored batches have the size of the calibration batches; a training step wants other samples each time. Whether rows of
different batches may be mixed is not assumed but tested: the block must compute the same for some rows alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from sparsebit.execution.blocks.engine import BatchValues, BlockData
from sparsebit.execution.blocks.runner import Values
from sparsebit.execution.blocks.value_store import MIB
from sparsebit.execution.sample_rows import is_alike, is_row_tensor
from sparsebit.graph.values.nested import map_nested, tensors_of

# Stored batches that are shuffled together: as many as fit, at least one.
_CHUNK_BYTES = 256 * MIB
Mode = Literal["mixed", "within", "whole"]


@dataclass(frozen=True)
class Minibatch:
    """Values of a few samples. `float_inputs` and `extras` are empty unless they were requested."""

    inputs: Values
    float_inputs: Values
    targets: Values
    extras: Values


class BlockSamples:
    """The samples of all batches.

    A sample is a row of every tensor that crosses the block's border. Whether the rows are independent of each other
    is tested on the first batch. If they are, samples of several batches are mixed ("mixed"), or, if batches
    differ in their other sizes, drawn from one batch at a time ("within"). If they are not (the rows are positions,
    or a size crosses the border), batches are used as they are ("whole").
    """

    def __init__(self, data: BlockData, extras: BatchValues | None = None, *, needs_float: bool = False) -> None:
        self.data, self.extras, self.needs_float = data, extras, needs_float
        self.mode = self._mode()

    def minibatches(self, size: int, generator: torch.Generator) -> Iterator[Minibatch]:
        """An endless sequence of mini-batches, in an order that the generator decides."""
        while True:
            order = torch.randperm(self.data.num_batches, generator=generator).tolist()
            if self.mode == "whole":
                yield from map(self._batch, order)
            elif self.mode == "within":
                for index in order:
                    yield from _drawn([self._batch(index)], size, generator)
            else:
                for chunk in self._chunks(order):
                    yield from _drawn(chunk, size, generator)

    def _batch(self, index: int) -> Minibatch:
        data, extras = self.data, () if self.extras is None else self.extras[index]
        float_inputs = data.float_inputs[index] if self.needs_float else ()
        return Minibatch(data.inputs[index], float_inputs, data.targets[index], extras)

    def _chunks(self, order: Sequence[int]) -> Iterator[list[Minibatch]]:
        chunk: list[Minibatch] = []
        size = 0
        for index in order:
            batch = self._batch(index)
            own = sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(_values(batch)))
            if chunk and size + own > _CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
            chunk.append(batch)
            size += own
        yield chunk

    def _mode(self) -> Mode:
        first = self._batch(0)
        if not self._has_independent_rows(first):
            return "whole"
        batches = (self._batch(index) for index in range(self.data.num_batches))
        forms, rows = zip(*((_form(batch), _which_have_rows(batch)) for batch in batches), strict=True)
        if len(set(rows)) > 1:  # in one batch a constant happens to have as many rows as there are samples
            return "whole"
        constants = not all(rows[0])
        return "mixed" if len(set(forms)) == 1 and not (constants and self.data.num_batches > 1) else "within"

    @torch.no_grad()
    def _has_independent_rows(self, batch: Minibatch) -> bool:
        """Whether the block computes the same for some rows separately as together with the others."""
        count = num_rows(batch)
        if count < 2 or not all(is_row_tensor(tensor, count) for tensor in tensors_of(batch.targets)):
            return False
        chosen = torch.arange(count - 1, -1, -2)
        try:
            some = self.data.run(_rows(batch.inputs, chosen, count))
            whole = self.data.run(batch.inputs)
        except Exception:  # a size that does not fit the rows: anything may be raised by the block's ops
            return False
        pairs = zip(tensors_of(some), tensors_of(whole), strict=True)
        return all(is_alike(one, other[chosen]) for one, other in pairs)


def num_rows(batch: Minibatch) -> int:
    return next((len(tensor) for tensor in tensors_of(batch.targets) if tensor.ndim), 0)


def _drawn(chunk: Sequence[Minibatch], size: int, generator: torch.Generator) -> Iterator[Minibatch]:
    """The samples of a few batches, each once."""
    counts = [num_rows(batch) for batch in chunk]
    owners = torch.repeat_interleave(torch.arange(len(chunk)), torch.tensor(counts))
    order = torch.randperm(len(owners), generator=generator)
    whole = chunk[0] if len(chunk) == 1 else _joined(chunk)
    # A remainder below half a mini-batch is dropped in this round: its gradient would be mostly noise.
    for chosen in order.split(size):
        if len(chosen) * 2 < size and len(chosen) < len(order):
            continue
        chosen = chosen[owners[chosen].argsort(stable=True)]
        yield Minibatch(*(_rows(getattr(whole, field.name), chosen, len(order)) for field in fields(Minibatch)))


def _joined(chunk: Sequence[Minibatch]) -> Minibatch:
    pieces = (zip(*(getattr(batch, field.name) for batch in chunk), strict=True) for field in fields(Minibatch))
    return Minibatch(*(tuple(map(_concatenated, values)) for values in pieces))


def _concatenated(values: tuple[Any, ...]) -> Any:
    joined = (torch.cat(parts) for parts in zip(*map(tensors_of, values), strict=True))
    return map_nested(Tensor, lambda tensor: next(joined), values[0])


def _rows(values: Values, chosen: Tensor, count: int) -> Values:
    def cut(tensor: Tensor) -> Tensor:
        return tensor[chosen.to(tensor.device)] if is_row_tensor(tensor, count) else tensor

    return tuple(map_nested(Tensor, cut, value) for value in values)


def _which_have_rows(batch: Minibatch) -> tuple[bool, ...]:
    """For each tensor whether it has a row for each sample; False for a value without tensors."""
    count = num_rows(batch)
    return tuple(
        is_row
        for value in _values(batch)
        for is_row in [is_row_tensor(tensor, count) for tensor in tensors_of(value)] or [False]
    )


def _values(batch: Minibatch) -> Values:
    return (*batch.inputs, *batch.float_inputs, *batch.targets, *batch.extras)


def _form(batch: Minibatch) -> tuple[Any, ...]:
    """The properties that must be equal to mix samples of several batches."""
    return tuple(
        tuple((tensor.shape[1:], tensor.dtype) for tensor in tensors_of(value)) or repr(value)
        for value in _values(batch)
    )
