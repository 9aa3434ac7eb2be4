"""The squared error that candidate ranges would cause: exact on samples, by running integrals on histograms."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebit.numerics.qparams import qparams_from_range
from sparsebit.numerics.spec import PerTensor, TensorSpec
from sparsebit.quantization.observers.statistics import Histogram

# Numbers in a temporary: a few MB stay in a core's cache.
CELLS = 1 << 19
# Up to here every level is looked up. Above, levels are as narrow as bins, and the error inside is step^2 / 12.
MOST_BITS_BY_LEVEL = 8

# Rows up to this long are quantized themselves, longer ones are judged by their histogram.
LONGEST_SAMPLES = 1 << 16
# Weights err together: where a layer's inputs have a mean, as behind a ReLU, it carries the sum of an output's errors
# on, and least squares, which clip more of one sign than of the other, may lose to min-max by it. The inputs are not
# known here. Their squared mean over their variance is 0.47 for a rectified Gaussian, and less over channels of unequal
# means. At 0.1 it gained 1 to 2 dB of the output of a ResNet, a MobileNet and a ViT at 4 bits.
MEAN_SHARE = 0.1


class Distortion(Protocol):
    """Each row's sum of `(x - fake_quantize(x))^2` for ranges `low`, `high`: `(R, candidates)`, as is the answer."""

    def __call__(self, low: Tensor, high: Tensor) -> Tensor: ...


class SampleDistortion:
    """Of the values in `rows` (R, n), each of them quantized with every candidate.

    `mean_share` adds that multiple of the squared sum of a row's errors: what they do to an output if its inputs have
    a common mean whose square is `mean_share` times their variance.
    """

    def __init__(self, rows: Tensor, spec: TensorSpec, mean_share: float = 0.0) -> None:
        self.rows, self.spec, self.mean_share = rows, spec, mean_share

    def __call__(self, low: Tensor, high: Tensor) -> Tensor:
        scale, zero_point = qparams_from_range(low, high, self.spec)
        first, last = (self.spec.qmin - zero_point)[..., None], (self.spec.qmax - zero_point)[..., None]
        error = torch.empty_like(scale)
        for part in slices(len(low), self.rows.shape[1] * low.shape[1]):
            steps = self.rows[part, None, :].float() / scale[part, :, None]
            codes = steps.round()
            # In the place of clamp, which is five times as slow with tensors as bounds.
            codes = torch.minimum(torch.maximum(codes, first[part], out=codes), last[part], out=codes)
            residual = codes.sub_(steps)
            error[part] = torch.linalg.vector_norm(residual, dim=2).square_()
            if self.mean_share:
                error[part] += self.mean_share * residual.sum(2).square_()
        return error.double() * scale.double().square()


class HistogramDistortion:
    """Of a histogram's values, taken as spread evenly over each bin; zeros never err.

    With `G(b)` the sum of `b - x` over all `x < b`, a grid with step `s` and last level `q` errs by
    `sum (x - q)^2 - 2 s sum_b G(b)`, where `b` runs over the midpoints between levels (summation by parts). `G` is a
    quadratic inside each bin, so that a candidate costs one look-up per level, however many values there are.
    """

    def __init__(self, histogram: Histogram, spec: TensorSpec) -> None:
        assert histogram.counts is not None
        counts = histogram.counts.double()
        self.spec, self.width, self.first_bin = spec, histogram.width[:, None], histogram.first_bin[:, None].double()
        # Positions are in widths from the first bin. At each bin's left edge: the number of values below, its
        # integral G, and the integral of 2 G, which is the sum of (b - x)^2. One bin more, for the last right edge.
        number = pad(counts.cumsum(1), (1, 0))
        integral = pad((number[:, :-1] + counts / 2).cumsum(1), (1, 0))
        square = pad((2 * integral[:, :-1] + number[:, :-1] + counts / 3).cumsum(1), (1, 0))
        self.counts, self.number, self.integral, self.square = pad(counts, (0, 1)), number, integral, square
        centres = torch.arange(counts.shape[1], device=counts.device) + 0.5
        self.sum = (counts * centres).sum(1, keepdim=True)
        self.sum_of_squares = (counts * (centres.double().square() + 1 / 12)).sum(1, keepdim=True)

    def __call__(self, low: Tensor, high: Tensor) -> Tensor:
        scale, zero_point = qparams_from_range(low, high, self.spec)
        step = scale.double() / self.width
        first, last = ((code - zero_point) * step - self.first_bin for code in (self.spec.qmin, self.spec.qmax))
        error = self.sum_of_squares - 2 * last * self.sum + last.square() * self.number[:, -1:]
        if self.spec.bits <= MOST_BITS_BY_LEVEL:
            error -= 2 * step * self._sum_over_midpoints(first, step)
        else:
            (below_first, clipped), (below_last, inside) = self._number_and_square(first), self._number_and_square(last)
            error += clipped - inside + (below_last - below_first) * step.square() / 12
        return error.clamp_(min=0) * self.width.square()

    def _sum_over_midpoints(self, first: Tensor, step: Tensor) -> Tensor:
        midpoints = torch.arange(self.spec.num_levels - 1, device=step.device) + 0.5
        result = torch.empty_like(step)
        for part in slices(len(step), step.shape[1] * len(midpoints)):
            at = first[part, :, None] + midpoints * step[part, :, None]
            edge, rest = self._bin_of(at.flatten(1))
            counts, number, integral = (t[part].gather(1, edge) for t in (self.counts, self.number, self.integral))
            value = counts.mul_(rest).div_(2).add_(number).mul_(rest).add_(integral)
            result[part] = value.unflatten(1, at.shape[1:]).sum(2)
        return result

    def _number_and_square(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """The number of values below `at`, and the sum of `(at - x)^2` over them."""
        edge, rest = self._bin_of(at)
        tables = (self.counts, self.number, self.integral, self.square)
        counts, number, integral, square = (table.gather(1, edge) for table in tables)
        return number + counts * rest, square + rest * (2 * integral + rest * (number + counts * rest / 3))

    def _bin_of(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Index of the bin and way into it. Left of the bins all tables are 0; right of them the last entry goes on."""
        edge = at.long().clamp_(0, self.counts.shape[1] - 1)
        return edge, (at - edge).clamp_(min=0)


def distortion_of_weights(rows: Tensor, spec: TensorSpec) -> SampleDistortion:
    """Of weights and, by `MEAN_SHARE`, of their outputs; a row is one output's weights or a group of these."""
    return SampleDistortion(rows, spec, 0.0 if isinstance(spec.granularity, PerTensor) else MEAN_SHARE)


def distortion_of(histogram: Histogram, rows: Tensor | None, spec: TensorSpec) -> Distortion:
    """By the values themselves where they are kept (`rows`, weights) and not too many, else by their histogram."""
    if rows is None or rows.shape[1] > LONGEST_SAMPLES:
        return HistogramDistortion(histogram, spec)
    return distortion_of_weights(rows, spec)


def slices(num_rows: int, cells_per_row: int) -> list[slice]:
    """Runs of rows, one or more each, that together need no more than `CELLS` numbers."""
    step = max(1, CELLS // max(1, cells_per_row))
    return [slice(start, start + step) for start in range(0, num_rows, step)]
