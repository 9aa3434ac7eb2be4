"""A progress bar for long work; nothing is shown where the output is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

_quiet = False


def set_quiet(quiet: bool) -> None:
    """Switch all progress bars off (`--quiet`) or back on."""
    global _quiet
    _quiet = quiet


def track(items: Iterable[T], what: str) -> Iterator[T]:
    """The same items, with a bar while they are worked through (on a terminal, from ten items on)."""
    size = len(items) if isinstance(items, Sequence) else None
    if _quiet or not sys.stderr.isatty() or (size is not None and size < 10):
        yield from items
        return
    from rich.console import Console
    from rich.progress import track as rich_track

    yield from rich_track(items, description=what, total=size, console=Console(stderr=True), transient=True)
