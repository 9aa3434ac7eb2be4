"""`SiteErrors`: the error of one quantizer's own rounding and clipping, and a small histogram of the float values.

Statistics are sums and at most 64 bins, so memory does not grow with the data. The histogram's bin width is a power of
two that doubles when values fall outside; old bins then merge in pairs, so the result does not depend on the order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparsebit.deploy.comparing.parity import decibels
from sparsebit.numerics.qparams import broadcast_to
from sparsebit.quantization.calibrating.model_state import switched
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.records import SiteError, ValueHistogram
from sparsebit.records.error_profile import MOST_BINS

# At most so many values of one tensor go into the histogram: counting all would take as long as running the layer.
SAMPLE = 1 << 16
# The bin width for values that are all equal: finer than float32 can distinguish, because a width can only grow.
_BITS_OF_ONE_VALUE, _EXPONENT_OF_ZERO = 40, -200


class SiteErrors:
    """Errors of one site over many tensors. Values count after the quantizer's transform (DoReFa: tanh)."""

    def __init__(self, quantizer: Quantizer, *, histogram: bool) -> None:
        self.quantizer = quantizer
        self.histogram = GrowingHistogram() if histogram else None
        self.quantized = GrowingHistogram() if histogram else None
        self.peaks: Tensor | None = None  # the largest absolute value of each channel
        self.count = self.num_clipped = 0
        self.noise = self.signal = 0.0
        self.low, self.high = math.inf, -math.inf

    @torch.no_grad()
    def add(self, x: Tensor) -> None:
        """Quantize `x`, whether or not the quantizer is switched on, and count."""
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.layout is not torch.strided or not x.numel():
            return
        quantizer = self.quantizer
        with switched([quantizer], to=True):
            quantized = quantizer.forward(x).float()
        values = quantizer.transform(x).float()
        self.count += values.numel()
        self.noise += float((quantized - values).square().sum(dtype=torch.float64))
        self.signal += float(values.square().sum(dtype=torch.float64))
        finite = values if bool(torch.isfinite(values.sum())) else values[torch.isfinite(values)]
        if finite.numel():
            self.low, self.high = min(self.low, float(finite.min())), max(self.high, float(finite.max()))
        self.num_clipped += self._num_clipped(values)
        self._add_peaks(values)
        if self.histogram is not None and self.quantized is not None:
            self.histogram.add(_sampled(finite))
            self.quantized.add(_sampled(quantized[torch.isfinite(quantized)]))

    def result(self) -> SiteError:
        quantizer = self.quantizer
        low, high = (end.detach() for end in quantizer.dequantized_range())
        return SiteError(
            site=quantizer.name,
            target="weight" if quantizer.target == "weight" else "activation",
            format=quantizer.spec.dtype_name,
            num_scales=low.numel(),
            mse=self.noise / self.count,
            sqnr_db=decibels(self.signal, self.noise),
            low=self.low,
            high=self.high,
            clip_low=float(low.min()),
            clip_high=float(high.max()),
            clipped=self.num_clipped / self.count,
            histogram=None if self.histogram is None else self.histogram.result(),
            quantized=None if self.quantized is None else self.quantized.result(),
            scales=_in_short(quantizer.qparams()[0].detach().abs()),
            peaks=() if self.peaks is None else _in_short(self.peaks),
        )

    def _add_peaks(self, values: Tensor) -> None:
        """Channels are axis 0 of weights, axis 1 of images and the last axis of other activations."""
        if values.dim() < 2:
            return
        axis = 0 if self.quantizer.target == "weight" else 1 if values.dim() >= 4 else values.dim() - 1
        found = values.abs().movedim(axis, 0).flatten(1).amax(1).nan_to_num()
        if self.peaks is not None:
            # Calls of one site with different numbers of channels have no common channels.
            found = torch.maximum(self.peaks, found) if self.peaks.shape == found.shape else found[:0]
        self.peaks = found

    def _num_clipped(self, values: Tensor) -> int:
        """The number of values outside of the range by more than half a step: rounding alone changes none so much."""
        spec = self.quantizer.spec
        low, high = (end.detach() for end in self.quantizer.dequantized_range())
        margin = (high - low) / (spec.qmax - spec.qmin) / 2 if spec.format == "integer" else torch.zeros_like(low)
        low, high = (broadcast_to(end, values.shape, spec.granularity) for end in (low - margin, high + margin))
        return int(((values < low) | (values > high)).sum())


def _in_short(values: Tensor) -> tuple[float, ...]:
    """The values in ascending order; if there are more than `MOST_BINS`, a sample of evenly spaced ones."""
    ordered = values.float().flatten().sort().values
    if len(ordered) > MOST_BINS:
        ordered = ordered[torch.linspace(0, len(ordered) - 1, MOST_BINS).round().long()]
    return tuple(ordered.tolist())


class GrowingHistogram:
    """Counts in up to 64 bins, whose width, a power of two, grows with the values: so their order does not matter."""

    def __init__(self) -> None:
        self.exponent = 0  # of the width
        self.first = 0  # the first bin starts at `first * width`
        self.counts = torch.zeros(0, dtype=torch.int64)

    def add(self, values: Tensor) -> None:
        """Count finite values, in any shape."""
        if not values.numel():
            return
        values = values.reshape(-1).double().cpu()
        low, high = float(values.min()), float(values.max())
        if not len(self.counts):
            self.exponent = _finest(low, high)
        while True:
            first, last = self._ends(low, high)
            if last - first < MOST_BINS:
                break
            self._coarsen()
        places = torch.floor(values * 2.0**-self.exponent).long()
        counts = torch.zeros(last - first + 1, dtype=torch.int64)
        counts[self.first - first : self.first - first + len(self.counts)] += self.counts
        self.first, self.counts = first, counts + torch.bincount(places - first, minlength=len(counts))

    def result(self) -> ValueHistogram | None:
        """The histogram; None if nothing was counted."""
        width = 2.0**self.exponent
        counts = tuple(self.counts.tolist())
        return ValueHistogram(self.first * width, width, counts) if counts else None

    def _ends(self, low: float, high: float) -> tuple[int, int]:
        """The first and the last bin of the values counted and of these."""
        width = 2.0**self.exponent
        first, last = math.floor(low / width), math.floor(high / width)
        return (
            (min(first, self.first), max(last, self.first + len(self.counts) - 1))
            if len(self.counts)
            else (first, last)
        )

    def _coarsen(self) -> None:
        self.exponent += 1
        if not len(self.counts):
            return
        odd = self.first % 2
        padded = torch.nn.functional.pad(self.counts, (odd, (odd + len(self.counts)) % 2))
        self.first, self.counts = self.first // 2, padded.view(-1, 2).sum(1)


def _finest(low: float, high: float) -> int:
    """The exponent of the smallest width that these values may be counted with."""
    if high > low:
        return math.floor(math.log2((high - low) / MOST_BINS))
    return math.frexp(high)[1] - 1 - _BITS_OF_ONE_VALUE if high else _EXPONENT_OF_ZERO


def _sampled(values: Tensor) -> Tensor:
    """At most `SAMPLE` values, at a stride that has no common factor with the size.

    Otherwise all samples could come from the same channel.
    """
    size = values.numel()
    step = -(-size // SAMPLE)
    while math.gcd(step, size) > 1:
        step += 1
    return values.reshape(-1)[::step]
