"""Values for `pytest.mark.parametrize`, in few lines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def listed(text: str) -> list[str]:
    """`"a | b"`: its parts. Several of them on a line, where a list would take a line for each."""
    return [part.strip() for part in text.split("|")]


def first_fast(values: Iterable[Any], count: int = 1) -> list[Any]:
    """The first `count` values as they are; the others are slow. A tuple has a value for each of several names."""
    groups = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*group, marks=[pytest.mark.slow] * (place >= count)) for place, group in enumerate(groups)]
