"""Getting along with torch's compilers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Made = TypeVar("Made")


def is_exporting() -> bool:
    """Whether `torch.export` traces this. `torch.compiler.is_exporting()` of torch 2.11 says so of every compiler."""
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def made_aside(make: Callable[[], Made]) -> Made:
    """What an operator keeps for its next calls, made in a thread of its own.

    A compiler that is about to record a CUDA graph takes all memory of its own thread for the graph's.
    """
    with ThreadPoolExecutor(1) as aside:
        return aside.submit(make).result()
