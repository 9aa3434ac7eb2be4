"""`Magnitudes`: which powers of two the values of a site reach, and the gap that separates a mask's numbers.

A mask hides values with a number that no data reaches (-1e4, -1e9, the lowest float). A grid that stretches to it has
one code for everything else. The statistic finds such numbers by their values, wherever they come from: an empty range
of magnitudes lies between them and all other values. Data has no such gap: outliers, such as the massive activations
of language models, are the end of a continuous tail.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_LOWEST_EXPONENT, _NUM_EXPONENTS = -150, 280  # of float32 and bfloat16, subnormal numbers included
_LARGEST = torch.finfo(torch.float32).max
_NO_GRID = 100  # from 2^100, or 1e30, ranges and sums overflow float32: no gap is required


@dataclass(frozen=True)
class Apart:
    """Two sides of a gap: numbers of at least `smallest`, and all others, which are below `others`."""

    smallest: float
    others: float

    def __str__(self) -> str:
        return f"values from {self.smallest:.2g} on, all others below {self.others:.2g}"


@dataclass(frozen=True)
class GapRule:
    """Values of at least `2^least` are a mask's numbers if no value lies in `gap` or more powers of two below them."""

    least: int
    gap: int


# At least 4,096, and 256 times all others. Massive activations of language models reach some thousands, but at most a
# hundred times the next values.
ANYWHERE = GapRule(12, 8)
# Before a softmax the rule is laxer: a mask may use -100, because exp(-32) is zero already, and a grid with a step of
# 1/8 changes a probability by 12 %. Float costs nothing there: no runtime computes a softmax in integers.
BEFORE_SOFTMAX = GapRule(5, 2)


class Magnitudes:
    """Gathers the exponents of all non-zero values that `update` gets."""

    def __init__(self) -> None:
        self.present = torch.zeros(_NUM_EXPONENTS, dtype=torch.bool)

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        if x.numel() == 0 or torch.compiler.is_compiling():  # a compiled step cannot look at values
            return
        x = x.detach()
        # On CPUs two passes are faster than `aminmax`.
        largest = torch.stack((x.amin(), x.amax())).abs().amax()
        if not bool(torch.isfinite(largest)) or not bool(largest):
            return
        if float(largest) < 2.0**BEFORE_SOFTMAX.least:  # too small for a mask: only the size of the others is recorded
            values = largest.reshape(1).float()
        else:
            values = x.flatten().clamp(-_LARGEST, _LARGEST).float() if x.dtype == torch.float64 else x.flatten().float()
            values = values[values != 0]
        exponents = torch.frexp(values).exponent - _LOWEST_EXPONENT
        self.present |= torch.bincount(exponents, minlength=_NUM_EXPONENTS).bool().cpu()

    def merge(self, other: Magnitudes) -> None:
        self.present |= other.present

    def apart(self, rule: GapRule) -> Apart | None:
        """The numbers that the rule separates; None if there are none."""
        exponents = [int(place) + _LOWEST_EXPONENT for place in self.present.nonzero().flatten()]
        for low, high in zip([None, *exponents], exponents, strict=False):
            is_huge = high > _NO_GRID
            has_gap = low is not None and high - low > rule.gap and high > rule.least
            if is_huge or has_gap:
                return Apart(2.0 ** (high - 1), 0.0 if low is None else 2.0**low)
        return None
