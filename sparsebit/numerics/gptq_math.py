"""GPTQ: rounding a weight column by column, each error passed on to the columns that are still to be rounded.

Legend: `W (groups, rows, columns)` the weight that is wanted, `V` its values on the grid, `q` their codes,
`H (groups, columns, columns)` the second moments of the layer's input, `U` upper triangular with `H^-1 = U^T U`.
The loss is the squared error of the layer's output, `tr((W - V) H (W - V)^T)`; rows are independent of each other.

- `round_columns`: Frantar et al., "GPTQ" (2022), section 3, algorithm 1, with lazy updates in blocks.
- `descend`: Behdin et al., "QuantEase" (2023), section 3: each code in turn the best one beside the others.
- `refit_scale`: the loss is quadratic in the scales too; for one scale per row `s = (q H w) / (q H q)`.
- `with_variance`: the loss is least for outputs that are smaller than wanted; their size is restored.
- `target_weight`: Li et al., "GPTAQ" (2025), section 4, and Zhang et al., "Qronos" (2025), section 3: inputs that
  differ from the float ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from sparsebit.numerics.hessian import activation_order, inverse_factor
from sparsebit.numerics.qparams import SMALLEST_SCALE
from sparsebit.numerics.reference import nearest_float8
from sparsebit.numerics.spec import TensorSpec

ScaleSearch = Literal["none", "nearest", "gptq"]


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

    def nearest(self, W: Tensor) -> Tensor:
        """The codes of the nearest values, as numbers of the type of `W`."""
        return self.spread().nearest(W)

    def values(self, codes: Tensor) -> Tensor:
        return self.spread().values(codes)

    def spread(self) -> Spread:
        """With a scale and a zero point for each element."""
        return Spread(self.scale[self.index], self.zero_point[self.index], self.spec)

    def with_scale(self, scale: Tensor) -> Grid:
        """Another scale, rounded as a model keeps it; one that is no scale stays as it was."""
        scale = torch.where(torch.isfinite(scale) & (scale > 0), scale, self.scale)
        scale = torch.maximum(scale, self.smallest.to(scale)).clamp(max=torch.finfo(self.stored).max)
        return replace(self, scale=scale.to(self.stored).to(self.scale.dtype))

    def with_zero_point(self, zero_point: Tensor) -> Grid:
        """Other zero points, rounded to codes; those of a symmetric grid stay 0."""
        if self.spec.symmetric:
            return self
        return replace(self, zero_point=zero_point.round().clamp(self.spec.qmin, self.spec.qmax))

    def permuted(self, order: Tensor) -> Grid:
        """With the columns in another order, `(groups, columns)`."""
        return replace(self, index=_columns(self.index, order))


@dataclass(frozen=True)
class Spread:
    """A grid with the scale and the zero point of each element, in the shape of the weight or of a part of it."""

    scale: Tensor
    zero_point: Tensor
    spec: TensorSpec

    def nearest(self, W: Tensor) -> Tensor:
        if self.spec.format == "float8":
            return nearest_float8(W / self.scale)
        return (W / self.scale).round_().add_(self.zero_point).clamp_(self.spec.qmin, self.spec.qmax)

    def values(self, codes: Tensor) -> Tensor:
        return (codes - self.zero_point) * self.scale

    def transposed(self) -> Spread:
        return Spread(self.scale.mT.contiguous(), self.zero_point.mT.contiguous(), self.spec)

    def line(self, number: int) -> Spread:
        """One line of the second-last axis."""
        here = slice(number, number + 1)
        return Spread(self.scale[..., here, :], self.zero_point[..., here, :], self.spec)


@dataclass(frozen=True)
class Rounding:
    """How `quantize` rounds; the fields are the options of `gptq`."""

    act_order: bool = True
    damping: float = 0.01
    block_size: int = 128
    scale_search: ScaleSearch = "nearest"
    num_candidates: int = 24
    smallest_factor: float = 0.5
    sweeps: int = 2
    refit: bool = True
    zero_point_shift: int = 0


@dataclass(frozen=True)
class Rounded:
    """Codes on a grid, and the loss of each row, `(groups, rows)`: of these codes, and of rounding to nearest."""

    codes: Tensor
    grid: Grid
    loss: Tensor
    nearest_loss: Tensor

    @property
    def values(self) -> Tensor:
        return self.grid.values(self.codes)


def quantize(W: Tensor, H: Tensor, grid: Grid, rounding: Rounding) -> Rounded:
    """`W` on the grid, or on one with better scales, such that the loss is small: never above that of round-to-nearest.

    The steps: the scales are searched, GPTQ rounds, then `sweeps` times: scales are fitted to the codes (`refit`), and
    codes to the scales (`descend`). Without search, refit and sweeps this is plain GPTQ.
    """
    nearest = grid.nearest(W)
    nearest_loss = row_loss(W, grid.values(nearest), H.to(W))
    factor = _Factor(H, rounding)
    H = H.to(W)  # the factor alone needs float64
    chosen = search_scale(W, H, grid, factor, rounding)
    chosen, codes, loss = _finish(W, H, chosen, factor.round(W, chosen), rounding)
    is_worse = loss > nearest_loss  # GPTQ is greedy: it may lose, most often where the input hardly correlates
    if _rows_share_scales(grid):
        is_worse = (loss.sum() > nearest_loss.sum()).expand_as(loss)
    codes = torch.where(is_worse[..., None], nearest, codes)
    scale, zero_point = chosen.scale.clone(), chosen.zero_point.clone()
    back = grid.index[is_worse].flatten()
    scale[back], zero_point[back] = grid.scale[back], grid.zero_point[back]
    grid = replace(grid, scale=scale, zero_point=zero_point)
    return Rounded(codes, grid, torch.where(is_worse, nearest_loss, loss), nearest_loss)


def round_nearest(W: Tensor, H: Tensor, grid: Grid, rounding: Rounding) -> Rounded:
    """`W` rounded to nearest, with scales and zero points that are searched if `rounding` says so."""
    H = H.to(W)
    nearest_loss = row_loss(W, grid.values(grid.nearest(W)), H)
    chosen = search_scale(W, H, grid, None, rounding)
    codes = chosen.nearest(W)
    return Rounded(codes, chosen, row_loss(W, chosen.values(codes), H), nearest_loss)


def row_loss(W: Tensor, V: Tensor, H: Tensor) -> Tensor:
    """`(w - v) H (w - v)^T` of each row, `(groups, rows)`."""
    error = W - V
    return ((error @ H) * error).sum(-1).clamp_(min=0)


def round_columns(W: Tensor, U: Tensor, grid: Grid, block_size: int = 128) -> Tensor:
    """The codes that GPTQ takes, from the first column to the last.

    After a column is rounded, those behind it are moved by `-(w - v) / U_jj * U_j,:`, which takes up as much of its
    error as they can. Columns behind a block are moved once per block.
    """
    # Columns lie one behind another in memory here: a column of a row-major matrix is slow to read and to write.
    rest, factor, spread = W.mT.contiguous(), U, grid.spread().transposed()
    codes = torch.empty_like(rest)
    for start in range(0, rest.shape[-2], block_size):
        stop = min(start + block_size, rest.shape[-2])
        errors = torch.empty_like(rest[..., start:stop, :])
        for column in range(start, stop):
            here, own = slice(column, column + 1), spread.line(column)
            taken = own.nearest(rest[..., here, :])
            error = (rest[..., here, :] - own.values(taken)) / factor[..., here, here]
            rest[..., here.stop : stop, :] -= factor[..., here, here.stop : stop].mT * error
            codes[..., here, :], errors[..., column - start : column - start + 1, :] = taken, error
        rest[..., stop:, :] -= factor[..., start:stop, stop:].mT @ errors
    return codes.mT.contiguous()


def descend(W: Tensor, H: Tensor, codes: Tensor, grid: Grid, block_size: int = 128) -> Tensor:
    """One sweep over the columns, in which each code becomes the best one beside all others: the loss never grows."""
    gradient = ((grid.values(codes) - W) @ H).mT.contiguous()  # half of the loss's; columns one behind another
    wanted, codes, spread = W.mT.contiguous(), codes.mT.contiguous(), grid.spread().transposed()
    curvature = H.diagonal(dim1=-2, dim2=-1)[..., None]
    for start in range(0, wanted.shape[-2], block_size):
        stop = min(start + block_size, wanted.shape[-2])
        moves = torch.empty_like(wanted[..., start:stop, :])
        for column in range(start, stop):
            here, own = slice(column, column + 1), spread.line(column)
            before = own.values(codes[..., here, :])
            bend = curvature[..., here, :]
            best = torch.where(bend > 0, before - gradient[..., here, :] / bend, wanted[..., here, :])
            taken = own.nearest(best)
            move = own.values(taken) - before
            gradient[..., here.stop : stop, :] += H[..., here, here.stop : stop].mT * move
            codes[..., here, :], moves[..., column - start : column - start + 1, :] = taken, move
        gradient[..., stop:, :] += H[..., start:stop, stop:].mT @ moves
    return codes.mT.contiguous()


def refit_scale(W: Tensor, H: Tensor, codes: Tensor, grid: Grid) -> Grid:
    """The grid with the scales that make the loss of these codes smallest.

    Where a row has several scales they are fitted in turn, each beside the others as they are by then, so that the loss
    never grows. Codes that are all zero say nothing of their scale.
    """
    steps = codes - grid.zero_point[grid.index]
    rest = W - steps * grid.scale[grid.index]
    for columns in shared_columns(grid):
        own, index = steps[..., columns], grid.index[..., columns[0]]  # (groups, rows)
        pull = own @ H[:, columns]
        toward = _sum_by_scale((pull * rest).sum(-1), grid, columns)
        below = _sum_by_scale((pull[..., columns] * own).sum(-1), grid, columns)
        before = grid.scale
        grid = grid.with_scale(torch.where(below > 0, before + toward / below, before))
        rest[..., columns] -= own * (grid.scale - before)[index][..., None]
    return grid


def with_variance(rounded: Rounded, W: Tensor, H: Tensor, variance: Tensor) -> Rounded:
    """The same codes, with scales such that each row's output has the variance that it has in the float model.

    `variance (groups, rows)`: of the float output. Least squares from inputs with noise makes outputs smaller, by a
    share that the noise decides (regression dilution), and in a deep network the shares multiply: the outputs of
    EfficientNet-Lite0 with 4 bits were 0.76 of what they should be. Rows that share a scale get one factor. Factors are
    held within [0.5, 2]; a row that is constant, rounded or not, keeps its scale.
    """
    grid, V = rounded.grid, rounded.values
    own = ((V @ H.to(V)) * V).sum(-1)
    wanted = variance.to(own)
    if _rows_share_scales(grid):
        own, wanted = (power.sum().expand_as(power) for power in (own, wanted))
    is_live = (own > 0) & (wanted > 0)
    factor = torch.where(is_live, wanted / torch.where(is_live, own, 1.0), 1.0).sqrt().clamp(0.5, 2.0)
    scale = grid.scale.clone()
    scale[grid.index] = (grid.scale[grid.index] * factor[..., None]).to(scale)
    grid = grid.with_scale(scale)
    return replace(rounded, grid=grid, loss=row_loss(W, grid.values(rounded.codes), H.to(W)))


def search_scale(W: Tensor, H: Tensor, grid: Grid, factor: _Factor | None, rounding: Rounding) -> Grid:
    """The grid with each scale multiplied by the factor in `[smallest_factor, 1]` that has the smallest loss.

    The loss of a candidate is that of its nearest codes (`nearest`), or of those that GPTQ takes (`gptq`). Of a row
    with several scales each is judged by the part of the loss inside its own columns. `zero_point_shift`: zero points
    up to so many codes lower and higher are tried afterwards, with factors near the best, if there are any.
    """
    if rounding.scale_search == "none" or rounding.num_candidates < 2:
        return grid
    shares = torch.linspace(1, rounding.smallest_factor, rounding.num_candidates, dtype=torch.float64).tolist()
    coarse = [(share, 0) for share in shares]
    is_by_gptq = rounding.scale_search == "gptq" and factor is not None
    search = _Search(W, H, grid, factor if is_by_gptq else None)
    best = search.best_of(grid, coarse)
    if grid.spec.symmetric or not rounding.zero_point_shift:
        return best
    step = shares[0] - shares[1]
    moves = [move for move in range(-rounding.zero_point_shift, rounding.zero_point_shift + 1) if move]
    return search.best_of(best, [(share, move) for move in moves for share in (1 - step, 1.0, 1 + step)])


class _Search:
    """The smallest loss found so far of each scale, and what was tried to find it."""

    def __init__(self, W: Tensor, H: Tensor, grid: Grid, factor: _Factor | None) -> None:
        self.W, self.factor = W, factor
        self.parts = [(columns, H[:, columns[:, None], columns]) for columns in shared_columns(grid)]
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
            best = replace(
                best,
                scale=torch.where(is_better, candidate.scale, best.scale),
                zero_point=torch.where(is_better, candidate.zero_point, best.zero_point),
            )
        return best

    def _losses(self, grid: Grid) -> Tensor:
        """The loss inside the columns of each scale."""
        codes = None if self.factor is None else self.factor.round(self.W, grid)
        loss = torch.zeros_like(grid.scale)
        for columns, own in self.parts:
            index = grid.index[..., columns[0], None]  # in every row the columns share a scale
            spread = Spread(grid.scale[index], grid.zero_point[index], grid.spec)
            wanted = self.W[..., columns]
            error = wanted - spread.values(spread.nearest(wanted) if codes is None else codes[..., columns])
            loss += _sum_by_scale(((error @ own) * error).sum(-1), grid, columns)
        return loss


def target_weight(W: Tensor, H: Tensor, cross: Tensor, damping: float = 0.01, share: float = 1.0) -> Tensor:
    """The weight that on the inputs of the quantized model comes nearest to what `W` gives on those of the float model.

    `cross = X_float^T X / n`. With `T = W cross H^-1` the error `|X_float W^T - X V^T|^2` is
    `tr((T - V) H (T - V)^T)` and a rest that no `V` changes: GPTQ on `T` corrects for the inputs, without any change of
    its own. Damped: `T = W + share * W (cross - H) (H + damping)^-1`, the ridge solution that stays near `W`.
    """
    U = inverse_factor(H, damping)
    return W + share * (W @ (cross - H) @ U.mT) @ U


def chosen_damping(
    W: Tensor, halves: Sequence[tuple[Tensor, Tensor]], dampings: Sequence[float] = (0.01, 0.1, 1.0)
) -> float | None:
    """The damping with which `target_weight` serves data best that it was not fitted to; None: `W` itself is best.

    `halves`: `(H, cross)` of each half of the data. What is fitted to one is judged by the other. Where there are few
    rows for each column, or samples differ, a fit to all of them would follow their noise.
    """
    errors = dict.fromkeys((None, *dampings), 0.0)
    for fitted, judge in itertools.permutations(halves, 2):
        for damping in errors:
            V = W if damping is None else target_weight(W, *fitted, damping)
            errors[damping] += _judged_error(W, V, judge)
    return min(errors, key=errors.__getitem__)


def chosen_rounding(
    W: Tensor,
    halves: Sequence[tuple[Tensor, Tensor]],
    target: Callable[[Tensor, Tensor], Tensor],
    grid: Grid,
    rounding: Rounding,
    dampings: Sequence[float] = (0.1, 1.0, 10.0),
) -> Rounding:
    """The rounding, with its damping or the larger one that serves data best that it was not fitted to.

    `halves`: as for `chosen_damping`. `target`: the weight that is rounded, from `H` and `cross` of a half. GPTQ moves
    errors to where the data has hardly any input. With few rows for each column there are many such directions, and
    other data has inputs there: damping makes GPTQ trust them less, up to rounding to nearest.
    """
    errors = dict.fromkeys((rounding.damping, *(d for d in dampings if d > rounding.damping)), 0.0)
    for fitted, judge in itertools.permutations(halves, 2):
        wanted = target(*fitted)
        for damping in errors:
            V = grid.values(_Factor(fitted[0], replace(rounding, damping=damping)).round(wanted, grid))
            errors[damping] += _judged_error(W, V, judge)
    return replace(rounding, damping=min(errors, key=errors.__getitem__))


def _judged_error(W: Tensor, V: Tensor, judge: tuple[Tensor, Tensor]) -> float:
    """The squared error of `V` on quantized inputs beside `W` on float ones, less a rest that no `V` changes."""
    H, cross = judge
    return float(((V @ H - 2 * (W @ cross)) * V).sum())


def shared_columns(grid: Grid) -> list[Tensor]:
    """The sets of columns that share a scale within a row."""
    pattern = grid.index[:, 0]  # (groups, columns): alike in every row
    labels = pattern - pattern.amin(-1, keepdim=True)
    _, labels = torch.unique(labels, dim=1, return_inverse=True)
    return [torch.nonzero(labels == label).flatten() for label in range(int(labels.max()) + 1)]


class _Factor:
    """The factor of the inverse Hessian, and the order of the columns that it was made for."""

    def __init__(self, H: Tensor, rounding: Rounding) -> None:
        self.block_size = rounding.block_size
        self.order = activation_order(H) if rounding.act_order else None
        if self.order is not None:
            H = _columns(_columns(H, self.order).mT, self.order)
        self.U = inverse_factor(H, rounding.damping)

    def round(self, W: Tensor, grid: Grid) -> Tensor:
        U = self.U.to(W)
        if self.order is None:
            return round_columns(W, U, grid, self.block_size)
        codes = round_columns(_columns(W, self.order), U, grid.permuted(self.order), self.block_size)
        return _columns(codes, self.order.argsort(-1))


def _finish(W: Tensor, H: Tensor, grid: Grid, codes: Tensor, rounding: Rounding) -> tuple[Grid, Tensor, Tensor]:
    """Scales fitted to the codes and codes to the scales, as often as `sweeps` says; the last step fits the scales."""
    for _ in range(rounding.sweeps):
        if rounding.refit:
            grid = refit_scale(W, H, codes, grid)
        after = descend(W, H, codes, grid, rounding.block_size)
        if torch.equal(after, codes):
            break
        codes = after
    if rounding.refit:
        grid = refit_scale(W, H, codes, grid)
    return grid, codes, row_loss(W, grid.values(codes), H)


def _columns(x: Tensor, order: Tensor) -> Tensor:
    """`x (groups, rows, columns)` with the columns of each group in the order given."""
    return x.gather(-1, order[:, None].expand(x.shape))


def _rows_share_scales(grid: Grid) -> bool:
    num_rows = grid.index[..., 0].numel()
    rows = torch.arange(num_rows, device=grid.index.device)[:, None].expand(num_rows, grid.index.shape[-1]).flatten()
    first, last = torch.full_like(grid.scale, num_rows), torch.full_like(grid.scale, -1)
    first.scatter_reduce_(0, grid.index.flatten(), rows.to(first.dtype), "amin")
    last.scatter_reduce_(0, grid.index.flatten(), rows.to(first.dtype), "amax")
    return bool((first < last).any())


def _sum_by_scale(per_row: Tensor, grid: Grid, columns: Tensor) -> Tensor:
    """`(groups, rows)` summed over the rows that share the scale of these columns, `(num_scales,)`."""
    return torch.zeros_like(grid.scale).index_add_(0, grid.index[..., columns[0]].flatten(), per_row.flatten())
