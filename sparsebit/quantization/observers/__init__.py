"""Observers: gather statistics of a tensor over the calibration data, and compute its range from them.

Importing this package registers the built-in names: minmax, moving_average, percentile, mse, kl_histogram, aciq.
"""

from __future__ import annotations

from sparsebit.quantization.observers import aciq, kl, mse, ranges
from sparsebit.quantization.observers.observer import Observer, build_observer, register_observer

__all__ = ["Observer", "aciq", "build_observer", "kl", "mse", "ranges", "register_observer"]
