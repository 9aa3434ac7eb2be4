"""Histograms of tensors, for the tests of observers."""

from __future__ import annotations

from torch import Tensor

from sparsebit.quantization.observers.histogram import Histogram


def histogram_of(*parts: Tensor) -> Histogram:
    """`parts`: rows of channels, or values of one."""
    histogram = Histogram()
    for part in parts:
        histogram.update(part if part.ndim == 2 else part.view(1, -1))
    return histogram
