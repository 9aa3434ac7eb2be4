"""The squared error that candidate ranges would cause: exact on samples, by running integrals on histograms."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from sparsebit.numerics.qparams import qparams_from_range
from sparsebit.numerics.spec import TensorSpec
from sparsebit.quantization.observers.statistics import Histogram

# Numbers in a temporary: a few MB stay in a core's cache.
CELLS = 1 << 18
# Up to here every cell of the grid is looked up. Above, cells are as narrow as bins, and the error inside is step^2 / 12.
MOST_BITS_BY_CELLS = 8


class Distortion(Protocol):
    """Sum over each row of `(x - fake_quantize(x))^2` for ranges `low`, `high`: (R, candidates) -> (R, candidates)."""

    def __call__(self, low: Tensor, high: Tensor) -> Tensor: ...


class SampleDistortion:
    """Of the values in `rows` (R, n), each of them quantized with every candidate."""

    def __init__(self, rows: Tensor, spec: TensorSpec) -> None:
        self.rows, self.spec = rows, spec

    def __call__(self, low: Tensor, high: Tensor) -> Tensor:
        scale, zero_point = qparams_from_range(low, high, self.spec)
        lowest, highest = self.spec.qmin - zero_point, self.spec.qmax - zero_point
        step = max(1, CELLS // (self.rows.shape[1] * low.shape[1]))
        error = torch.empty_like(scale)
        for start in range(0, len(low), step):
            part = slice(start, start + step)
            steps = self.rows[part, None, :].float() / scale[part, :, None]
            residual = steps.round().clamp_(lowest[part, :, None], highest[part, :, None]).sub_(steps)
            error[part] = torch.linalg.vector_norm(residual, dim=-1)
        return (error * scale).double().square_()


class HistogramDistortion:
    """Of a histogram's values, taken as spread evenly over each bin; zeros never err.

    With `G(b)` the sum of `b - x` over all `x < b`, a grid of levels `q0 < ... < qm` at distance `s` errs by
    `sum (x - qm)^2 - 2 s sum_b G(b)`, where `b` runs over the midpoints between levels (Abel's summation). `G` is a quadratic inside
    each bin, so a candidate costs one look-up per level, however many values there are.
    """

    def __init__(self, histogram: Histogram, spec: TensorSpec) -> None:
        assert histogram.counts is not None
        self.spec, self.width, self.first_bin = spec, histogram.width[:, None], histogram.first_bin[:, None].double()
        counts = histogram.counts.double()
        centre = torch.arange(counts.shape[1], device=counts.device, dtype=counts.dtype) + 0.5
        zero = counts.new_zeros(len(counts), 1)
        # At the left edge of each bin, in units of the width: number of values below, integral of it (G), integral of 2 G.
        self.counts = torch.cat([counts, zero], 1)
        self.below = torch.cat([zero, counts.cumsum(1)], 1)
        self.first_order = torch.cat([zero, (self.below[:, :-1] + counts / 2).cumsum(1)], 1)
        self.second_order = torch.cat([zero, (2 * self.first_order[:, :-1] + self.below[:, :-1] + counts / 3).cumsum(1)], 1)
        self.total = self.below[:, -1:]
        self.sum = (counts * centre).sum(1, keepdim=True)
        self.sum_of_squares = (counts * (centre.square() + 1 / 12)).sum(1, keepdim=True)

    def __call__(self, low: Tensor, high: Tensor) -> Tensor:
        scale, zero_point = qparams_from_range(low, high, self.spec)
        step = scale.double() / self.width
        lowest = (self.spec.qmin - zero_point) * step - self.first_bin
        highest = (self.spec.qmax - zero_point) * step - self.first_bin
        around_highest = self.sum_of_squares - 2 * highest * self.sum + highest.square() * self.total
        if self.spec.bits <= MOST_BITS_BY_CELLS:
            error = around_highest - 2 * step * self._sum_over_midpoints(lowest, step)
        else:
            inside = self._integrals(highest)[0] - self._integrals(lowest)[0]
            error = self._integrals(lowest)[2] + around_highest - self._integrals(highest)[2] + inside * step.square() / 12
        return error.clamp_(min=0) * self.width.square()

    def _sum_over_midpoints(self, lowest: Tensor, step: Tensor) -> Tensor:
        midpoints = torch.arange(self.spec.num_levels - 1, device=step.device) + 0.5
        rows_at_a_time = max(1, CELLS // (step.shape[1] * len(midpoints)))
        result = torch.empty_like(step)
        for start in range(0, len(step), rows_at_a_time):
            part = slice(start, start + rows_at_a_time)
            at = (lowest[part, :, None] + midpoints * step[part, :, None]).flatten(1)
            result[part] = self._first_order(at, part).unflatten(1, (step.shape[1], -1)).sum(-1)
        return result

    def _first_order(self, at: Tensor, part: slice) -> Tensor:
        """G at positions `at` (rows, k) in widths from the first bin: 0 on the left of the bins, a straight line on their right."""
        edge = at.long().clamp_(0, self.counts.shape[1] - 1)
        rest = (at - edge).clamp_(min=0)
        counts, below, first = (table[part].gather(1, edge) for table in (self.counts, self.below, self.first_order))
        return counts.mul_(rest).div_(2).add_(below).mul_(rest).add_(first)

    def _integrals(self, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Number of values below `at`, and the sums of `at - x` and of its square over them."""
        edge = at.long().clamp_(0, self.counts.shape[1] - 1)
        rest = (at - edge).clamp_(min=0)
        counts, below, first, second = (
            table.gather(1, edge) for table in (self.counts, self.below, self.first_order, self.second_order)
        )
        number = below + counts * rest
        sum_of_distances = first + rest * (below + counts * rest / 2)
        return number, sum_of_distances, second + rest * (2 * first + rest * (below + counts * rest / 3))
