"""Bias correction: how far quantization shifts the mean of a layer's output, per channel.

Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction" (2019), section 4.2: replacing a
weight `W` by `V` shifts the mean of the output by `(V - W) E[x]`, which a bias can undo. Appendix D: the shift
measured as the difference of the two outputs' means, which includes the effect of quantized activations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsebit.errors import CalibrationError


def analytic_shift(W: Tensor, V: Tensor, mean: Tensor) -> Tensor:
    """`(W - V) E[x]`, the correction of the bias: `W`, `V (groups, rows, columns)`, `mean (groups, columns)`."""
    return ((W - V) @ mean[..., None])[..., 0]


def empirical_shift(targets: Means, outputs: Means) -> Tensor:
    """`E[float output] - E[output]`, the correction of the bias."""
    return targets.value - outputs.value


class Means:
    """The mean of each channel over batches, in float64; mergeable."""

    def __init__(self) -> None:
        self.count, self._sum = 0, torch.zeros((), dtype=torch.float64)

    def add(self, x: Tensor, axis: int, weight: int = 1) -> None:
        """Count every position of every sample, `weight` times; `axis`: the channel axis."""
        rows = x.detach().movedim(axis, 0).flatten(1) if x.ndim > 1 else x.detach()[:, None]  # (channels, positions)
        self._add(weight * rows.shape[1], weight * rows.sum(1, dtype=torch.float64))

    def merge(self, other: Means) -> None:
        self._add(other.count, other._sum)

    def state(self) -> dict[str, Any]:
        return {"count": self.count, "sum": self._sum.cpu()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Means:
        means = cls()
        means._add(state["count"], state["sum"])
        return means

    @property
    def value(self) -> Tensor:
        """`(channels,)`."""
        if not self.count:
            raise CalibrationError("no value was counted; give at least one batch with at least one sample")
        return self._sum / self.count

    def _add(self, count: int, total: Tensor) -> None:
        if count:
            self._sum = self._sum.to(total.device) + total
            self.count += count
