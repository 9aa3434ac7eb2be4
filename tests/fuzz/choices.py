"""Where a random program's decisions come from: a seed, or hypothesis."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class Choices:
    """Decisions drawn from `below(n)`, a number in 0..n-1. Zero is the simplest decision, so that shrinking works."""

    def __init__(self, below: Callable[[int], int]) -> None:
        self.below = below

    @classmethod
    def from_seed(cls, seed: int) -> Choices:
        return cls(random.Random(seed).randrange)

    @classmethod
    def from_hypothesis(cls, data: Any) -> Choices:
        """`data`: what `hypothesis.strategies.data()` gives."""
        from hypothesis import strategies

        return cls(lambda n: data.draw(strategies.integers(0, n - 1)) if n > 1 else 0)

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def chance(self, percent: int) -> bool:
        return self.below(100) >= 100 - percent

    def between(self, low: int, high: int) -> int:
        return low + self.below(high - low + 1)
