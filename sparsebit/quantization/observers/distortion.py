"""`Distortion`: the squared error that candidate ranges would cause, for all rows and all candidates at once.

`SampleDistortion` quantizes the values themselves, for weights. `HistogramDistortion` uses a histogram's running sums,
for activations. Both take ranges `low`, `high` of shape `(rows, candidates)`; the searches of `mse`, `kl` and `aciq`
call them. Work is split into `slices`, so that temporaries stay within a core's cache.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebit.numerics.qparams import qparams_from_range
from sparsebit.numerics.spec import PerTensor, TensorSpec
from sparsebit.quantization.observers.histogram import Histogram

# The most elements of a temporary: a few MB stay in a core's cache.
CELLS = 1 << 19
# Up to so many bits every level is looked up. Above, levels are as narrow as bins, and the error of a rounded value is
# step^2 / 12 on average.
MOST_BITS_BY_LEVEL = 8

# Rows up to this length are quantized themselves, longer ones are judged by their histogram.
LONGEST_SAMPLES = 1 << 16
# Errors of weights add up: if a layer's inputs have a mean, as after a ReLU, that mean multiplies the sum of an
# output's errors, so least squares, which clip more of one sign than of the other, may be worse than min-max. The
# inputs are not known here. Their squared mean over their variance is 0.47 for a rectified Gaussian, and less over
# channels of unequal means. At 0.1 it gained 1 to 2 dB of the output of a ResNet, a MobileNet and a ViT at 4 bits.
MEAN_SHARE = 0.1


# Each row's sum of `(x - fake_quantize(x))^2` for ranges `low`, `high`; all are `(R, candidates)`.
Distortion = Callable[[Tensor, Tensor], Tensor]


class SampleDistortion:
    """The error of the values in `rows` (R, n), each of them quantized with every candidate.

    `mean_share` adds that multiple of the squared sum of a row's errors: their effect on an output if its inputs have
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
            # minimum and maximum, because `clamp` with tensors as bounds is five times as slow.
            codes = torch.minimum(torch.maximum(codes, first[part], out=codes), last[part], out=codes)
            residual = codes.sub_(steps)
            error[part] = torch.linalg.vector_norm(residual, dim=2).square_()
            if self.mean_share:
                error[part] += self.mean_share * residual.sum(2).square_()
        return error.double() * scale.double().square()


class HistogramDistortion:
    """The error of a histogram's values, assumed to be evenly spread over each bin; zeros have no error.

    With `H(b)` the sum of `x - b` over all `x > b`, the error of the positive values is `sum x^2 - 2 s sum_b H(b)` on a
    grid with step `s`, where `b` runs over the midpoints between its levels from zero up (summation by parts); likewise
    for the negative ones. `H` is a quadratic inside each bin, so a candidate costs one look-up per level, for any
    number of values. All sums run from the far end inwards, or from zero outwards, so that rounding at an outlier's
    size hides no other value.
    """

    def __init__(self, histogram: Histogram, spec: TensorSpec) -> None:
        self.histogram, self.spec = histogram, spec
        counts, left, right = histogram.bins()
        self.num_bins, width = counts.shape[2], right - left
        # Beyond the right edge of each bin: the number of values, the sum of x - edge and the sum of (x - edge)^2.
        number = _sum_beyond(counts)
        first = _sum_beyond(width * (number + counts / 2))
        second = _sum_beyond(width * (2 * first + width * (number + counts / 3)))
        squares = counts * (left * right + width.square() / 3)
        self.sum_of_squares = squares.sum((1, 2))[:, None]
        self.tables = {"right": right, "density": (counts / width).where(width > 0, 0), "left": left}
        self.tables |= {"number": number, "first": first, "second": second}
        self.tables["squares_below"] = pad(squares.cumsum(2), (1, 0))[..., :-1]

    def __call__(self, low: Tensor, high: Tensor) -> Tensor:
        scale, zero_point = qparams_from_range(low, high, self.spec)
        step, zero_point = scale.double(), zero_point.double()
        if self.spec.bits <= MOST_BITS_BY_LEVEL:
            error = self.sum_of_squares - 2 * step * self._sum_over_midpoints(step, zero_point)
        else:
            error = self._of_sign(0, step, (self.spec.qmax - zero_point) * step)
            error = error + self._of_sign(1, step, (zero_point - self.spec.qmin) * step)
        return error.clamp_(min=0)

    def _sum_over_midpoints(self, step: Tensor, zero_point: Tensor) -> Tensor:
        midpoints = torch.arange(self.spec.qmin, self.spec.qmax, device=step.device) + 0.5
        result = torch.empty_like(step)
        for part in slices(len(step), step.shape[1] * len(midpoints)):
            at = ((midpoints - zero_point[part, :, None]) * step[part, :, None]).flatten(1)
            sign, at = (at < 0).long(), at.abs()
            index = self.histogram.bin_of(at, part).add_(sign, alpha=self.num_bins)
            right, density, number, first = self._looked_up(part, index, "right", "density", "number", "first")
            rest = right.sub_(at).clamp_(min=0)
            value = density.mul_(rest).div_(2).add_(number).mul_(rest).add_(first)
            result[part] = value.unflatten(1, (step.shape[1], -1)).sum(2)
        return result

    def _of_sign(self, sign: int, step: Tensor, top: Tensor) -> Tensor:
        """The error of one sign's values on many levels up to `top`.

        Values that round to zero are summed separately; those between two levels have an error of `step^2 / 12` on
        average.
        """
        bottom = torch.minimum(step / 2, top)
        index = self.histogram.bin_of(bottom) + sign * self.num_bins
        names = ("right", "density", "number", "left", "squares_below")
        right, density, number, left, squares = self._looked_up(slice(None), index, *names)
        inside = bottom.minimum(right)
        rounded_to_zero = squares + density * (inside**3 - left**3) / 3
        num_others = number + density * (right - bottom).clamp(min=0)
        index = self.histogram.bin_of(top) + sign * self.num_bins
        names = ("right", "density", "number", "first", "second")
        right, density, number, first, second = self._looked_up(slice(None), index, *names)
        rest = (right - top).clamp(min=0)
        num_clipped = number + density * rest
        clipped = second + rest * (2 * first + rest * (number + density * rest / 3))
        return rounded_to_zero + (num_others - num_clipped) * step.square() / 12 + clipped

    def _looked_up(self, rows: slice, index: Tensor, *names: str) -> list[Tensor]:
        return [self.tables[name][rows].flatten(1).gather(1, index) for name in names]


def _sum_beyond(values: Tensor) -> Tensor:
    """The sum of all that follow each value along the last axis."""
    return pad(values[..., 1:].flip(-1).cumsum(-1).flip(-1), (0, 1))


def distortion_of_weights(rows: Tensor, spec: TensorSpec) -> SampleDistortion:
    """The error of weights and, by `MEAN_SHARE`, of their outputs; a row is (a group of) one output's weights."""
    return SampleDistortion(rows, spec, 0.0 if isinstance(spec.granularity, PerTensor) else MEAN_SHARE)


def distortion_of(histogram: Histogram, rows: Tensor | None, spec: TensorSpec) -> Distortion:
    """By the values themselves if they are kept (`rows`, weights) and not too many, else by their histogram."""
    if rows is None or rows.shape[1] > LONGEST_SAMPLES:
        return HistogramDistortion(histogram, spec)
    return distortion_of_weights(rows, spec)


def slices(num_rows: int, cells_per_row: int) -> list[slice]:
    """Runs of rows, one or more each, that together need no more than `CELLS` numbers."""
    step = max(1, CELLS // max(1, cells_per_row))
    return [slice(start, start + step) for start in range(0, num_rows, step)]
