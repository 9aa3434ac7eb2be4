"""Fingerprints: equal for the same code, different for other code or other values that it closes over."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from sparsebit.compress.judging.fingerprint import fingerprint
from sparsebit.compress.judging.metrics import NOISE, TOP1, PerSample, WholeSet


def above(limit: float) -> Callable[[Any, Any], Any]:
    def score(outputs: Any, batch: Any) -> Any:
        return outputs > limit

    return score


def recursive() -> Callable[[int], int]:
    def count(n: int) -> int:
        return n and count(n - 1)

    return count


class Own:
    def __init__(self, data: list[int]) -> None:
        self.data = data

    def __call__(self, model: Any) -> float:
        return 1.0


class Other(Own):
    def __call__(self, model: Any) -> float:
        return 2.0


SAME: dict[str, tuple[Any, Any]] = {
    "closures": (above(0.5), above(0.5)),
    "objects": (Own([1]), Own([2])),
    "recursive": (recursive(), recursive()),
    "partial": (functools.partial(above, limit=1), functools.partial(above, limit=1)),
    "wrapped": (WholeSet(above(0.5)), WholeSet(above(0.5))),
}
DIFFERENT: dict[str, tuple[Any, Any]] = {
    "lambdas": (lambda outputs, batch: outputs + 1, lambda outputs, batch: outputs + 2),
    "names": (lambda outputs, batch: outputs.min(1), lambda outputs, batch: outputs.max(1)),
    "defaults": (lambda outputs, batch, k=1: k, lambda outputs, batch, k=2: k),
    "closures": (above(0.5), above(0.6)),
    "methods": (Own([1]), Other([1])),
    "bound methods": (Own([1]).__call__, Other([1]).__call__),
    "partial": (functools.partial(above, limit=1), functools.partial(above, limit=2)),
    "own": (TOP1, NOISE),
    "wrapped": (PerSample(above(0.5), "m"), PerSample(above(0.6), "m")),
    "inner functions": (lambda model: (lambda: 1)(), lambda model: (lambda: 2)()),
}


@pytest.mark.parametrize(("one", "other"), SAME.values(), ids=SAME)
def test_the_same_code(one: Any, other: Any) -> None:
    assert fingerprint(one) == fingerprint(other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT)
def test_other_code(one: Any, other: Any) -> None:
    assert fingerprint(one) != fingerprint(other)


def test_it_is_the_same_in_another_process() -> None:
    assert "0x" not in "".join(fingerprint(one) for pair in (*SAME.values(), *DIFFERENT.values()) for one in pair)
