"""`find_sample_rows`: which tensors of a batch have a row for each sample.

A mask or a table among the inputs may have as many rows as there are samples. The model itself shows which is which:
it computes the same for some samples separately as together with the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsebit.execution.batches import Call, input_rows, num_samples
from sparsebit.graph.values.nested import map_nested, tensors_of

# With more tensors than this, at most two are left out at a time: each trial is a run of the model.
_FEW = 4


@dataclass(frozen=True)
class SampleRows:
    """The samples of a batch: their number, and for each of its tensors, in order, whether its rows are samples."""

    count: int
    has_rows: tuple[bool, ...]

    def of(self, batch: Any, rows: Sequence[int]) -> Any:
        """The batch with only these of its samples."""
        return batch if tuple(rows) == tuple(range(self.count)) else rows_at(batch, rows, self.has_rows)

    def tensors(self, batch: Any) -> list[Tensor]:
        """The tensors whose rows are the samples."""
        return [tensor for tensor, has_rows in zip(tensors_of(batch), self.has_rows, strict=True) if has_rows]


@torch.no_grad()
def find_sample_rows(call: Call, run: Callable[..., Any], outputs: Any = None) -> SampleRows:
    """The samples of a call.

    If more than one tensor has a row for each sample, or no output has, `run` is called with some of the samples.
    If no choice of tensors reproduces the outputs (rows that depend on each other), all of them count; if the
    model does not run (no batch dimension, a fixed batch size), the call is one sample. `outputs`: of the whole call,
    if they are known.
    """

    def answer(batch: Call) -> Any:
        args, kwargs = map_nested(Tensor, torch.clone, batch)  # a model may write into its inputs
        return run(*args, **kwargs)

    is_lone = input_rows(call) <= {1}
    outputs = answer(call) if outputs is None and not is_lone else outputs
    count = num_samples(call, outputs)
    has_rows = tuple(is_row_tensor(tensor, count) for tensor in tensors_of(call))
    is_clear = sum(has_rows) == 1 and any(is_row_tensor(tensor, count) for tensor in tensors_of(outputs))
    if is_lone or is_clear or count < 2:
        return SampleRows(count, has_rows)
    if found := independent_rows(call, count, outputs, answer):
        return SampleRows(count, found)
    try:
        answer(rows_at(call, _some_of(count), has_rows))
    except Exception:  # anything may be raised by the model's ops
        return SampleRows(1, (False,) * len(has_rows))
    return SampleRows(count, has_rows)


@torch.no_grad()
def independent_rows(batch: Any, count: int, outputs: Any, run: Callable[[Any], Any]) -> tuple[bool, ...]:
    """For each tensor of the batch whether its rows are samples that `run` computes independently; `()` if none are.

    All tensors with `count` rows are tried first, then fewer of them. `outputs`: of the whole batch.
    """
    whole = [tensor for tensor in tensors_of(outputs) if is_row_tensor(tensor, count)]
    flags = tuple(is_row_tensor(tensor, count) for tensor in tensors_of(batch))
    chosen = _some_of(count)
    if count < 2 or not whole:
        return ()
    for some in _choices(flags):
        try:
            found = tensors_of(run(rows_at(batch, chosen, some)))
        except Exception:  # a size that does not fit the rows: anything may be raised by the model's ops
            continue
        found = [tensor for tensor in found if is_row_tensor(tensor, len(chosen))]
        if len(found) == len(whole) and all(map(is_alike, found, (tensor[list(chosen)] for tensor in whole))):
            return some
    return ()


def rows_at(batch: Any, rows: Sequence[int], has_rows: Sequence[bool]) -> Any:
    """The same nested structure with these rows of each tensor that has rows, in the order of the tensors."""
    flags, places = iter(has_rows), torch.tensor(list(rows), dtype=torch.long)
    return map_nested(Tensor, lambda tensor: tensor[places.to(tensor.device)] if next(flags) else tensor, batch)


def is_alike(one: Tensor, other: Tensor) -> bool:
    """Whether values are equal up to 5 %: kernels for other batch sizes round differently, and change a few codes."""
    if one.shape != other.shape or not one.is_floating_point():
        return one.shape == other.shape
    return float((one - other).norm()) <= 0.05 * float(other.norm())


def is_row_tensor(tensor: Tensor, count: int) -> bool:
    """Whether the tensor has a row for each of `count` samples."""
    return tensor.ndim > 0 and len(tensor) == count


def _some_of(count: int) -> range:
    """Every second row, in reverse order, so that rows which depend on their position or neighbours differ."""
    return range(count - 1, -1, -2)


def _choices(flags: tuple[bool, ...]) -> Iterator[tuple[bool, ...]]:
    """The flags, and then with some of the True ones left out: one of them, two of them, ..., all but one."""
    places = [place for place, flag in enumerate(flags) if flag]
    most = len(places) - 1 if len(places) <= _FEW else 2
    for left_out in itertools.chain.from_iterable(itertools.combinations(places, n) for n in range(most + 1)):
        yield tuple(flag and place not in left_out for place, flag in enumerate(flags))
