"""`ErrorProfile`: the error that quantization brings to every layer's output and to every quantized tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sparsebit.records.accuracy_gains import AccuracyGains

MOST_BINS = 64


@dataclass(frozen=True)
class LayerError:
    """The error that quantization brings to one layer's output (or to the model's, sync)."""

    layer: str
    error: float
    sqnr_db: float


@dataclass(frozen=True)
class ValueHistogram:
    """How many values fell into each of at most 64 bins of equal width: bin `i` starts at `low + i * width`.

    `width` is a power of two and `low` a multiple of it. Counted are the finite ones of a sample of the values.
    """

    low: float
    width: float
    counts: tuple[int, ...]

    @property
    def high(self) -> float:
        return self.low + self.width * len(self.counts)


@dataclass(frozen=True)
class SiteError:
    """One quantizer on float values: the error of its own rounding and clipping, and what the values look like.

    `low`, `high`: the extremes of the float values. `clip_low`, `clip_high`: the smallest and the largest value that
    can come out; with several scales those of the widest. `clipped`: the share of values outside of their own scale's
    range. `histogram`: None where it was not asked for.
    """

    site: str
    target: Literal["weight", "activation"]
    format: str
    num_scales: int
    mse: float
    sqnr_db: float
    low: float
    high: float
    clip_low: float
    clip_high: float
    clipped: float
    histogram: ValueHistogram | None = None


@dataclass(frozen=True)
class ErrorProfile:
    """The errors of layers and of quantized tensors, as `QuantModel.profile` measures them.

    `sync`: the layers' errors are those of all layers quantized together; else of each alone.
    Quantized tensors are measured on float inputs either way. `data`: the inputs in words. `gains`: what
    `QuantModel.accuracy_gains` found; None where it was not asked for.
    """

    sync: bool
    num_batches: int
    layers: tuple[LayerError, ...]
    sites: tuple[SiteError, ...] = ()
    data: str | None = None
    gains: AccuracyGains | None = None
