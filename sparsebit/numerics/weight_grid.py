"""`Grid`: the values that a weight may take, with a scale for any set of its elements; `Lines`: the same by columns.

GPTQ and scale searches (`rounding/*_math.py`) work on these, for every granularity alike. `Grid` looks a scale up by
the element's index. `Lines` is for loops over columns of a transposed weight: the columns that share a scale within a
row are a set, and whole lines of scales are gathered at once. `Spread` has the scale of every element of some columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sparsebit.numerics.float4 import Float4Spec, nearest_float4
from sparsebit.numerics.qparams import SMALLEST_SCALE
from sparsebit.numerics.reference import nearest_float8
from sparsebit.numerics.spec import TensorSpec


@dataclass(frozen=True)
class Grid:
    """The values that a weight may take: `(q - zero_point) * scale`, with one scale for any set of its elements.

    `scale`, `zero_point`: `(num_scales,)`. `index (groups, rows, columns)`: the scale of each element. In every row the
    same columns share a scale. `smallest`: below which no scale is changed, `(num_scales,)` or `()`. `stored`: the type
    in which the scales are kept afterwards; changed ones are rounded to it, so that every step sees what is kept.
    """

    scale: Tensor
    zero_point: Tensor
    index: Tensor
    spec: TensorSpec
    smallest: Tensor = field(default_factory=lambda: torch.tensor(SMALLEST_SCALE))
    stored: torch.dtype = torch.float32

    def nearest(self, weight: Tensor) -> Tensor:
        """The codes of the nearest values, as numbers of the type of `weight`."""
        steps = weight / self.scale[self.index]
        if self.spec.format == "float8" or isinstance(self.spec, Float4Spec):
            return nearest_float8(steps) if self.spec.format == "float8" else nearest_float4(steps)
        return steps.round_().add_(self.zero_point[self.index]).clamp_(self.spec.qmin, self.spec.qmax)

    def values(self, codes: Tensor) -> Tensor:
        return (codes - self.zero_point[self.index]) * self.scale[self.index]

    def with_scale(self, scale: Tensor) -> Grid:
        """Another scale, rounded as a model stores it; where it is not finite and positive, the old scale stays."""
        return replace(self, scale=kept_scale(scale, self.scale, self.smallest, self.stored))

    def with_zero_point(self, zero_point: Tensor) -> Grid:
        """Other zero points, rounded to codes; those of a symmetric grid stay 0."""
        if self.spec.symmetric:
            return self
        return replace(self, zero_point=zero_point.round().clamp(self.spec.qmin, self.spec.qmax))

    def lines(self) -> Lines:
        """The scales and zero points of whole columns."""
        number = set_numbers(self)
        num_sets = int(number.max()) + 1
        first = torch.full((num_sets,), len(number), device=number.device)
        first.scatter_reduce_(0, number, torch.arange(len(number), device=number.device), "amin")
        index = self.index[..., first].mT.contiguous()
        has_none = self.spec.symmetric and not bool(self.zero_point.any())
        zero_point = None if has_none else self.zero_point[index]
        return Lines(self.scale[index], zero_point, number.expand(self.index.shape[0], -1), index, self)


@dataclass(frozen=True)
class Lines:
    """A grid by columns, for a weight that is stored transposed, `(groups, columns, rows)`: a column is a line there.

    Columns that share a scale within a row are a set. `scale`, `zero_point` (None: all are 0) and `index`, the number
    of the scale in the grid: `(groups, sets, rows)`. `number (groups, columns)`: the set of each column. Below, *steps*
    are codes less the zero point: `steps * scale` is the value.
    """

    scale: Tensor
    zero_point: Tensor | None
    number: Tensor
    index: Tensor
    grid: Grid

    def ordered(self, order: Tensor) -> Lines:
        """With the columns of each group in another order, `(groups, columns)`."""
        return replace(self, number=self.number.gather(1, order))

    def columns(self) -> list[slice | Tensor]:
        """The columns of each set, which are the same in every group as long as no order was given."""
        found: list[slice | Tensor] = []
        for columns in _split(self.number[0]):
            first, last = int(columns[0]), int(columns[-1])
            found.append(slice(first, last + 1) if last - first + 1 == len(columns) else columns)
        return found

    def spread(self, columns: slice = slice(None)) -> Spread:
        """With a scale for each element of these columns, `(groups, columns, rows)`."""
        scale, spec = self._of(self.scale, columns), self.grid.spec
        if self.zero_point is None:
            return Spread(scale, spec.qmin, spec.qmax, spec)
        zero_point = self._of(self.zero_point, columns)
        return Spread(scale, spec.qmin - zero_point, spec.qmax - zero_point, spec)

    def codes(self, steps: Tensor) -> Tensor:
        """`(groups, columns, rows)`."""
        return steps if self.zero_point is None else steps + self._of(self.zero_point)

    def steps(self, codes: Tensor) -> Tensor:
        return codes if self.zero_point is None else codes - self._of(self.zero_point)

    def with_scale(self, scale: Tensor) -> Lines:
        """Other scales, `(groups, sets, rows)`, that are kept unchanged; those of one number must be equal."""
        flat = self.grid.scale.clone()
        flat[self.index] = scale
        return replace(self, scale=scale, grid=replace(self.grid, scale=flat))

    def sum_by_scale(self, per_row: Tensor, index: Tensor) -> Tensor:
        """The sum of all numbers that share a scale, `(num_scales,)`; `index`: the number of each one's scale."""
        return torch.zeros_like(self.grid.scale).index_add_(0, index.flatten(), per_row.flatten())

    def rows_share_scales(self) -> bool:
        num_rows = self.index.shape[0] * self.index.shape[2]
        rows = torch.arange(num_rows, device=self.index.device).view(-1, 1, self.index.shape[2])
        rows = rows.expand_as(self.index).flatten()
        first, last = (torch.full_like(self.grid.scale, end, dtype=torch.long) for end in (num_rows, -1))
        first.scatter_reduce_(0, self.index.flatten(), rows, "amin")
        last.scatter_reduce_(0, self.index.flatten(), rows, "amax")
        return bool((first < last).any())

    def _of(self, param: Tensor, columns: slice = slice(None)) -> Tensor:
        """A parameter's lines for the columns: whole lines are copied, which is far faster than single elements."""
        groups, num_sets, num_rows = param.shape
        first = torch.arange(groups, device=param.device)[:, None] * num_sets
        number = (self.number[:, columns] + first).flatten()
        return param.reshape(-1, num_rows).index_select(0, number).view(groups, -1, num_rows)


@dataclass(frozen=True)
class Spread:
    """The scale of each element, and the lowest and the highest of its steps."""

    scale: Tensor
    low: Tensor | int
    high: Tensor | int
    spec: TensorSpec

    def tensors(self) -> list[Tensor]:
        """The scale, and the ends where they differ between elements."""
        return [self.scale, *(end for end in (self.low, self.high) if isinstance(end, Tensor))]

    @classmethod
    def of(cls, spec: TensorSpec, tensors: Sequence[Tensor]) -> Spread:
        """From `tensors()`."""
        scale, *ends = tensors
        low, high = ends or (spec.qmin, spec.qmax)
        return cls(scale, low, high, spec)

    def round_(self, steps: Tensor) -> Tensor:
        """The nearest steps that the grid has, in place."""
        if self.spec.format == "float8":
            return steps.copy_(nearest_float8(steps))
        if isinstance(self.spec, Float4Spec):
            return steps.copy_(nearest_float4(steps))
        return steps.round_().clamp_(self.low, self.high)  # type: ignore[arg-type]

    def by_column(self) -> list[Spread]:
        """One for each column, `(groups, rows)`."""
        columns = zip(*(tensor.unbind(1) for tensor in self.tensors()), strict=True)
        return [Spread.of(self.spec, parts) for parts in columns]


def set_numbers(grid: Grid) -> Tensor:
    """The number of the set of each column, `(columns,)`: columns of a set share a scale within a row."""
    pattern = grid.index[:, 0]  # (groups, columns): alike in every row
    labels = pattern - pattern.amin(-1, keepdim=True)
    if bool((labels == labels[:1]).all()):  # a search over whole columns takes several calls for each of them
        labels = labels[0]
    number: Tensor = torch.unique(labels, dim=labels.ndim - 1 or None, return_inverse=True)[1]
    return number


def shared_columns(grid: Grid) -> list[Tensor]:
    """The sets of columns that share a scale within a row."""
    return _split(set_numbers(grid))


def _split(number: Tensor) -> list[Tensor]:
    return list(number.argsort(stable=True).split(torch.bincount(number).tolist()))


def kept_scale(scale: Tensor, before: Tensor, smallest: Tensor, stored: torch.dtype) -> Tensor:
    """A scale as a model stores it, not below `smallest`; `before` where it is not finite and positive."""
    scale = torch.where(torch.isfinite(scale) & (scale > 0), scale, before)
    scale = torch.maximum(scale, smallest.to(scale)).clamp_(max=torch.finfo(stored).max)
    return scale.to(stored).to(before.dtype)
