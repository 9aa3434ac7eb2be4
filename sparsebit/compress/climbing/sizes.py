"""The size to ask for in the next candidate: on a line through measured files, or by bisection."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class SizeLine:
    """The size of a file as a straight line over what a recipe asks for (mean bits, or a share of the weights' bytes).

    The line goes through a measured file: `asked` was asked for, and it has `size`. `slope`: how much the size grows
    with each unit that is asked for.
    """

    asked: float
    size: float
    slope: float

    def asked_for(self, size: float) -> float:
        """What a recipe must ask for to get a file of this size.

        >>> SizeLine(asked=4, size=100, slope=20).asked_for(80)
        3.0
        """
        return self.asked + (size - self.size) / self.slope


def bracket(kept: Iterable[float], lost: Iterable[float]) -> tuple[float, float] | None:
    """The bounds of a bisection: the largest size that lost too much, below the smallest one that did not.

    None where one of them is missing: nothing that lost too much, or nothing that was kept.

    >>> bracket([4, 3], [2, 2.5, 3.5])
    (2.5, 3)
    """
    high = min(kept, default=None)
    low = max((size for size in lost if high is None or size < high), default=None)
    return None if high is None or low is None else (low, high)
