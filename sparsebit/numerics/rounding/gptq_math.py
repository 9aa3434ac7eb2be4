"""GPTQ: rounds a weight column by column, and passes each error on to the columns that are not rounded yet.

Legend: `W (groups, rows, columns)` the wanted weight, `V` its values on the grid, `q` their codes,
`H (groups, columns, columns)` the second moments of the layer's input, `U` upper triangular with `H^-1 = U^T U`.
The loss is the squared error of the layer's output, `tr((W - V) H (W - V)^T)`; rows are independent of each other.

- `_round_lines`: Frantar et al., "GPTQ" (2022), section 3, algorithm 1, with lazy updates in blocks.
- `_descend_lines`: Behdin et al., "QuantEase" (2023), section 3: each code in turn the best one with the others fixed.
- `_refit_lines`: the loss is quadratic in the scales too; for one scale per row `s = (q H w) / (q H q)`.
- `with_variance`: the loss is least for outputs that are too small; their size is restored.

Inside, weights are transposed (`Lines`): a column of a row-major matrix is slow to read and to write. The loops over
columns use few kernels, since on a GPU their number determines the time: codes are kept as steps from the zero
point, parameters are gathered once per block of columns, results are written in place, and on a GPU the loop over a
block is one CUDA graph (`Replayed`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from sparsebit.numerics.rounding.cuda_graph import Replayed
from sparsebit.numerics.rounding.hessian import activation_order, inverse_factor
from sparsebit.numerics.rounding.scale_search_math import Rounding, search_scale
from sparsebit.numerics.spec import TensorSpec
from sparsebit.numerics.weight_grid import Grid, Lines, Spread, kept_scale


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


class InverseFactor:
    """The factor of the inverse Hessian, and its order of the columns."""

    def __init__(self, H: Tensor, rounding: Rounding) -> None:
        self.block_size = rounding.block_size
        self.order = activation_order(H) if rounding.act_order else None
        self.U = inverse_factor(H, rounding.damping, self.order)
        self._only_rounds = False

    def only_rounds(self, dtype: torch.dtype) -> None:
        """Declare that from here on only `round` is called, with weights of this type: less precision is enough."""
        self.U, self._only_rounds = _shares_(self.U).to(dtype), True

    def solved(self, x: Tensor) -> Tensor:
        """`x (H + damping)^-1`, `(groups, rows, columns)`."""
        assert not self._only_rounds, "the factor was given up by only_rounds()"
        if self.order is None:
            return x @ self.U.mT @ self.U
        return _columns(_columns(x, self.order) @ self.U.mT @ self.U, self.order.argsort(-1))

    def round(self, W: Tensor, grid: Grid) -> Tensor:
        """The codes that GPTQ chooses, column by column in the order of the factor."""
        lines = grid.lines()
        return lines.codes(self.round_lines(W.mT.contiguous(), lines)).mT.contiguous()

    def round_lines(self, wanted: Tensor, lines: Lines) -> Tensor:
        """The steps for a weight by columns."""
        if self.order is None:
            return _round_lines(wanted.clone(), self.U, lines, self.block_size)
        steps = _round_lines(_lines(wanted, self.order), self.U, lines.ordered(self.order), self.block_size)
        return _lines(steps, self.order.argsort(-1))


def quantize(W: Tensor, H: Tensor, grid: Grid, rounding: Rounding, factor: InverseFactor | None = None) -> Rounded:
    """`W` on the grid, or on one with better scales, with a small loss: never above that of round-to-nearest.

    The steps: the scales are searched, GPTQ rounds, then `sweeps` times: scales are fitted to the codes (`refit`), and
    codes to the scales (`descend`). Without search, refit and sweeps this is plain GPTQ. `factor`: of `H` and
    `rounding`, if it is known.
    """
    factor = factor or InverseFactor(H, rounding)
    H = H.to(W)  # only the factor needs float64
    wanted, lines = W.mT.contiguous(), grid.lines()
    nearest_loss = _line_loss(wanted, _nearest(wanted, lines) * lines.spread().scale, H)
    chosen = search_scale(W, H, grid, lambda candidate: factor.round(W, candidate), rounding).lines()
    steps = factor.round_lines(wanted, chosen)
    chosen, steps, loss = _finish(wanted, H, chosen, steps, rounding)
    is_worse = loss > nearest_loss  # GPTQ is greedy: it may be worse, most often if the input hardly correlates
    if lines.rows_share_scales():
        is_worse = (loss.sum() > nearest_loss.sum()).expand_as(loss)
    codes = chosen.codes(steps)
    if bool(is_worse.any()):  # computed a second time: keeping the nearest steps would cost memory in large layers
        codes = torch.where(is_worse[:, None], lines.codes(_nearest(wanted, lines)), codes)
    scale, zero_point = chosen.grid.scale.clone(), chosen.grid.zero_point.clone()
    back = lines.index.mT[is_worse].flatten()
    scale[back], zero_point[back] = grid.scale[back], grid.zero_point[back]
    grid = replace(grid, scale=scale, zero_point=zero_point)
    return Rounded(codes.mT.contiguous(), grid, torch.where(is_worse, nearest_loss, loss), nearest_loss)


def round_nearest(W: Tensor, H: Tensor, grid: Grid, rounding: Rounding) -> Rounded:
    """`W` rounded to nearest, with scales and zero points that are searched if `rounding` requires it."""
    H = H.to(W)
    nearest_loss = row_loss(W, grid.values(grid.nearest(W)), H)
    chosen = search_scale(W, H, grid, None, rounding)
    codes = chosen.nearest(W)
    return Rounded(codes, chosen, row_loss(W, chosen.values(codes), H), nearest_loss)


def row_loss(W: Tensor, V: Tensor, H: Tensor) -> Tensor:
    """`(w - v) H (w - v)^T` of each row, `(groups, rows)`."""
    error = W - V
    return ((error @ H) * error).sum(-1).clamp_(min=0)


def _nearest(wanted: Tensor, lines: Lines) -> Tensor:
    """The steps of a weight by columns, rounded to nearest."""
    spread = lines.spread()
    return spread.round_(wanted / spread.scale)


def _line_loss(wanted: Tensor, values: Tensor, H: Tensor) -> Tensor:
    """`row_loss` of weights by columns."""
    error = wanted - values
    return (H @ error).mul_(error).sum(-2).clamp_(min=0)


def _round_lines(rest: Tensor, U: Tensor, lines: Lines, block_size: int) -> Tensor:
    """The steps that GPTQ chooses, from the first column to the last; `rest`, the weight by columns, is overwritten.

    After a column is rounded, later columns are moved by `-(w - v) / U_jj * U_j,:`, which compensates for its
    error as far as possible. Columns after a block are moved once per block.
    """
    shares = _shares_(U.to(rest, copy=True))
    steps, round_block = torch.empty_like(rest), Replayed(partial(_round_block, lines.grid.spec))
    for start in range(0, rest.shape[-2], block_size):
        stop = min(start + block_size, rest.shape[-2])
        here, errors = slice(start, stop), torch.empty_like(rest[:, start:stop])
        spread = lines.spread(here)
        round_block([shares[:, here, here], *spread.tensors()], [rest[:, here], steps[:, here], errors])
        if stop < rest.shape[-2]:
            rest[:, stop:].baddbmm_(shares[:, start:stop, stop:].mT, errors, alpha=-1)
    return steps


def _shares_(U: Tensor) -> Tensor:
    """The share of each column's error that later columns absorb, `U_j,: / U_jj`, in place of `U`; idempotent."""
    return U.div_(U.diagonal(dim1=-2, dim2=-1)[..., None].clone())


def _round_block(spec: TensorSpec, shares: Tensor, *others: Tensor) -> None:
    """Round the columns of a block; five kernels a column.

    `others`: the tensors of the spread, then `rest`, the weight, then the outputs `steps` and `errors`.
    """
    *own_spread, rest, steps, errors = others
    spread = Spread.of(spec, own_spread)
    columns = zip(rest.unbind(1), steps.unbind(1), errors.unbind(1), spread.by_column(), strict=True)
    for number, (wanted, taken, error, own) in enumerate(columns):
        own.round_(torch.div(wanted, own.scale, out=taken))
        torch.addcmul(wanted, taken, own.scale, value=-1, out=error)
        rest[:, number + 1 :].addcmul_(shares[:, number, number + 1 :, None], error[:, None], value=-1)


def _descend_lines(wanted: Tensor, H: Tensor, steps: Tensor, lines: Lines, block_size: int) -> Tensor:
    """One sweep over the columns: each step becomes the best one with all others fixed. The loss never grows."""
    curvature = H.diagonal(dim1=-2, dim2=-1)[..., None]
    # A column with a zero input gets the nearest codes; they change nothing else.
    if not bool((curvature > 0).all()):
        steps = torch.where(curvature > 0, steps, _nearest(wanted, lines))
    gradient = H @ (steps * lines.spread().scale).sub_(wanted)  # half of the loss's
    better, descend_block = torch.empty_like(steps), Replayed(partial(_descend_block, lines.grid.spec))
    for start in range(0, wanted.shape[-2], block_size):
        stop = min(start + block_size, wanted.shape[-2])
        here, moves = slice(start, stop), torch.empty_like(wanted[:, start:stop])
        known = [steps[:, here], H[:, here, here], *lines.spread(here).tensors()]
        descend_block(known, [gradient[:, here], better[:, here], moves])
        if stop < wanted.shape[-2]:
            gradient[:, stop:].baddbmm_(H[:, start:stop, stop:].mT, moves)
    return better


def _descend_block(spec: TensorSpec, steps: Tensor, H: Tensor, *others: Tensor) -> None:
    """Write the best steps of a block's columns into `better`, and the changes of values into `moves`.

    Six kernels a column. `others`: the tensors of the spread, then `gradient`, `better` and `moves`.
    """
    *own_spread, gradient, better, moves = others
    spread = Spread.of(spec, own_spread)
    bend = H.diagonal(dim1=-2, dim2=-1)[..., None] * spread.scale
    bend.masked_fill_(bend <= 0, torch.inf)  # a column with a zero input does not move
    parts = (part.unbind(1) for part in (steps, gradient, bend, better, moves))
    for number, (taken, pull, own_bend, best, move, own) in enumerate(zip(*parts, spread.by_column(), strict=True)):
        own.round_(torch.addcdiv(taken, pull, own_bend, value=-1, out=best))
        torch.sub(best, taken, out=move).mul_(own.scale)
        gradient[:, number + 1 :].addcmul_(H[:, number, number + 1 :, None], move[:, None])


def _refit_lines(wanted: Tensor, H: Tensor, steps: Tensor, lines: Lines) -> Lines:
    """With the scales that minimise the loss of these steps.

    If a row has several scales they are fitted in turn, each with the others fixed, so that the loss
    never grows. Codes that are all zero do not determine their scale.
    """
    rest = wanted - steps * lines.spread().scale
    is_shared, found = lines.rows_share_scales(), lines.scale.clone()
    smallest = lines.grid.smallest
    for number, columns in enumerate(lines.columns()):
        own, before = steps[:, columns], found[:, number]  # (groups, size, rows), (groups, rows)
        toward = (H[:, columns] @ rest).mul_(own).sum(1)
        below = (H[:, columns][:, :, columns] @ own).mul_(own).sum(1)
        index = lines.index[:, number]
        if is_shared:  # summed over the rows that have the same scale
            toward, below = (lines.sum_by_scale(part, index)[index] for part in (toward, below))
        fitted = torch.where(below > 0, before + toward / below, before)
        fitted = kept_scale(fitted, before, smallest[index] if smallest.ndim else smallest, lines.grid.stored)
        rest[:, columns] -= own * (fitted - before)[:, None]
        found[:, number] = fitted
    return lines.with_scale(found)


def with_variance(rounded: Rounded, W: Tensor, H: Tensor, variance: Tensor) -> Rounded:
    """The same codes, with scales for which each row's output has the variance that it has in the float model.

    `variance (groups, rows)`: of the float output. Least squares with noisy inputs makes outputs smaller, by a
    share that depends on the noise (regression dilution), and in a deep network the shares multiply: the outputs of
    EfficientNet-Lite0 with 4 bits were 0.76 of their correct size. Rows that share a scale get one factor. Factors are
    clamped to [0.5, 2]; a row that is constant, rounded or not, keeps its scale.
    """
    grid, V = rounded.grid, rounded.values
    own = ((V @ H.to(V)) * V).sum(-1)
    wanted = variance.to(own)
    if grid.lines().rows_share_scales():
        own, wanted = (power.sum().expand_as(power) for power in (own, wanted))
    is_live = (own > 0) & (wanted > 0)
    factor = torch.where(is_live, wanted / torch.where(is_live, own, 1.0), 1.0).sqrt().clamp(0.5, 2.0)
    scale = grid.scale.clone()
    scale[grid.index] = (grid.scale[grid.index] * factor[..., None]).to(scale)
    grid = grid.with_scale(scale)
    return replace(rounded, grid=grid, loss=row_loss(W, grid.values(rounded.codes), H.to(W)))


def _finish(wanted: Tensor, H: Tensor, lines: Lines, steps: Tensor, rounding: Rounding) -> tuple[Lines, Tensor, Tensor]:
    """Fit scales to the codes and codes to the scales, `sweeps` times; the last step fits the scales."""
    for _ in range(rounding.sweeps):
        if rounding.refit:
            lines = _refit_lines(wanted, H, steps, lines)
        after = _descend_lines(wanted, H, steps, lines, rounding.block_size)
        if torch.equal(after, steps):
            break
        steps = after
    if rounding.refit:
        lines = _refit_lines(wanted, H, steps, lines)
    return lines, steps, _line_loss(wanted, steps * lines.spread().scale, H)


def _columns(x: Tensor, order: Tensor) -> Tensor:
    """`x (groups, rows, columns)` with the columns of each group in the order given."""
    return x.gather(-1, order[:, None].expand(x.shape))


def _lines(x: Tensor, order: Tensor) -> Tensor:
    """`x (groups, columns, rows)` with the columns of each group in the order given, as a copy."""
    first = torch.arange(len(x), device=x.device)[:, None] * x.shape[1]
    return x.flatten(0, 1).index_select(0, (order + first).flatten()).view_as(x)
