"""A progress bar for long work; nothing is shown where the output is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

_quiet = False
_notes: list[Callable[[str], None]] = []  # of the bars that are shown, the innermost last


def set_quiet(quiet: bool) -> None:
    """Switch all progress bars off (`--quiet`) or back on."""
    global _quiet
    _quiet = quiet


def track(items: Iterable[T], what: str, *, fewest: int = 10) -> Iterator[T]:
    """The same items, with a bar while they are worked through (on a terminal, from `fewest` items on)."""
    size = len(items) if isinstance(items, Sequence) else None
    if _quiet or not sys.stderr.isatty() or (size is not None and size < fewest):
        yield from items
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=size)
        _notes.append(lambda text: bar.update(task, description=f"{what}: {text}"))
        try:
            yield from bar.track(items, task_id=task, total=size)
        finally:
            _notes.pop()


def note(text: str) -> None:
    """Show a few words (a loss, a name) beside the bar of the work that is under way, where there is one."""
    if _notes:
        _notes[-1](text)
