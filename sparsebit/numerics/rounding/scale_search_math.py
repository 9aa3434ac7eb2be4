"""The factor of each scale with the smallest squared error of the layer's output; legend: `gptq_math`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from sparsebit.numerics.weight_grid import Grid, Spread, shared_columns

CodesOf = Callable[[Grid], Tensor] | None
ScaleSearch = Literal["none", "nearest", "gptq"]
# Elements that are processed at a time. A CPU is fastest if they fit its cache (1 MiB of float32 each for weight, error
# and product), a GPU with large kernels.
_CPU_ELEMENTS, _GPU_ELEMENTS = 1 << 18, 1 << 26


@dataclass(frozen=True)
class Rounding:
    """How `gptq_math.quantize` rounds; the fields are the options of `gptq`."""

    act_order: bool = True
    damping: float = 0.01
    block_size: int = 128
    scale_search: ScaleSearch = "nearest"
    num_candidates: int = 24
    smallest_factor: float = 0.5
    sweeps: int = 2
    refit: bool = True
    zero_point_shift: int = 0


def search_scale(W: Tensor, H: Tensor, grid: Grid, codes_of: CodesOf, rounding: Rounding) -> Grid:
    """The grid with each scale multiplied by the factor in `[smallest_factor, 1]` that has the smallest loss.

    The loss of a candidate is that of its nearest codes (`nearest`), or of the codes of GPTQ, `codes_of`
    (`gptq`). Each of several scales of a row is judged by the part of the loss inside its own columns.
    `zero_point_shift`: zero points up to this many codes lower and higher are tried afterwards, with factors near the
    best, if there are any.
    """
    if rounding.scale_search == "none" or rounding.num_candidates < 2:
        return grid
    shares = torch.linspace(1, rounding.smallest_factor, rounding.num_candidates, dtype=torch.float64).tolist()
    coarse = [(share, 0) for share in shares]
    search = _Search(W, H, grid, codes_of if rounding.scale_search == "gptq" else None)
    best = search.best_of(grid, coarse)
    if grid.spec.symmetric or not rounding.zero_point_shift:
        return best
    step = shares[0] - shares[1]
    moves = [move for move in range(-rounding.zero_point_shift, rounding.zero_point_shift + 1) if move]
    return search.best_of(best, [(share, move) for move in moves for share in (1 - step, 1.0, 1 + step)])


class _Search:
    """The smallest loss found so far of each scale, and the change that led to it."""

    def __init__(self, W: Tensor, H: Tensor, grid: Grid, codes_of: CodesOf) -> None:
        self.codes_of, self.lines = codes_of, grid.lines()
        self.parts = list(_parts(W, H, grid))
        self.loss = torch.full_like(grid.scale, torch.inf)

    def best_of(self, grid: Grid, changes: list[tuple[float, int]]) -> Grid:
        """The grid with each scale times the share, and each zero point moved, as in the best of `changes`."""
        best = grid
        for share, move in changes:
            candidate = grid.with_scale(grid.scale * share)
            candidate = candidate.with_zero_point(grid.zero_point + move) if move else candidate
            loss = self._losses(candidate)
            is_better = loss < self.loss
            self.loss = torch.where(is_better, loss, self.loss)
            scale = torch.where(is_better, candidate.scale, best.scale)
            best = replace(best, scale=scale, zero_point=candidate.zero_point.where(is_better, best.zero_point))
        return best

    def _losses(self, grid: Grid) -> Tensor:
        """The loss inside the columns of each scale."""
        codes = None if self.codes_of is None else self.codes_of(grid)
        loss = torch.empty_like(self.lines.scale)
        spec = grid.spec
        for part in self.parts:
            index = self.lines.index[:, part.sets, :, None]
            scale, zero_point = grid.scale[index], 0 if self.lines.zero_point is None else grid.zero_point[index]
            if codes is None:
                spread = Spread(scale, spec.qmin - zero_point, spec.qmax - zero_point, spec)
                steps = spread.round_(part.wanted / scale)
            else:
                steps = part.take(codes) - zero_point
            error = steps.mul_(scale).sub_(part.wanted)
            loss[:, part.sets] = (error @ part.own).mul_(error).sum(-1)
        return self.lines.sum_by_scale(loss, self.lines.index)


@dataclass(frozen=True)
class _Part:
    """Sets of equally many columns: their numbers `sets`, `columns (sets, size)`, and their weight and `H`.

    `wanted`: `(groups, sets, rows, size)`. `own`: `(groups, sets, size, size)`.
    """

    sets: Tensor
    columns: Tensor
    wanted: Tensor
    own: Tensor

    def take(self, x: Tensor) -> Tensor:
        return _taken(x, self.columns)


def _parts(W: Tensor, H: Tensor, grid: Grid) -> Iterator[_Part]:
    """All sets, grouped by size, up to a number of elements that suits the device."""
    most = _CPU_ELEMENTS if W.device.type == "cpu" else _GPU_ELEMENTS
    sets = shared_columns(grid)
    sizes: dict[int, list[int]] = {}
    for number, columns in enumerate(sets):
        sizes.setdefault(len(columns), []).append(number)
    for size, numbers in sizes.items():
        at_once = max(most // (W.shape[0] * W.shape[1] * size), 1)
        for start in range(0, len(numbers), at_once):
            chosen = numbers[start : start + at_once]
            columns = torch.stack([sets[number] for number in chosen])
            own = H[:, columns[:, :, None], columns[:, None, :]]
            where = torch.tensor(chosen, device=W.device)
            yield _Part(where, columns, _taken(W, columns), own)


def _taken(x: Tensor, columns: Tensor) -> Tensor:
    """`(groups, rows, columns)` to `(groups, sets, rows, size)`."""
    return x[..., columns].transpose(1, 2).contiguous()
