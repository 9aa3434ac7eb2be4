"""Progress of long work: a bar on a terminal, plain lines if the output is a file or a pipe; time limits of loops.

Library code wraps loops in `track` and uncounted work in `phase`; `heartbeat`, which the CLI opens, prints a line at
least once a minute. Bars are shown by rich; the lines are our own, because rich prints nothing useful into a log file.
Since every long loop passes `track`, that is also where a `time_limit` ends it (`OutOfTime`, between two items).
"""

from __future__ import annotations

import contextlib
import operator
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

# Seconds. A finished item prints a line if the last line, and the start of its work, are at least `LEAST` ago;
# `heartbeat` prints one if the last line is `MOST` ago. So short work prints nothing, and long work is never silent.
LEAST, MOST = 10.0, 60.0
# The mean time of the last 16 items predicts the rest. Not of all items: a resumed run skips finished ones in no time.
_RECENT = 16

_quiet = False
_notes: list[Callable[[str], None]] = []  # one for each visible bar, the innermost last
_clock = time.monotonic
_ends: float | None = None  # when `track` raises OutOfTime


class OutOfTime(Exception):
    """The time of a `time_limit` is over. Work that uses `track` raises it between two items."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Inside, every loop over `track` ends with OutOfTime when the seconds are over; an outer limit still holds."""
    global _ends
    outer, own = _ends, _clock() + seconds
    _ends = own if outer is None else min(outer, own)
    try:
        yield
    finally:
        _ends = outer


def set_quiet(quiet: bool) -> None:
    """Switch all progress off (`--quiet`) or back on."""
    global _quiet
    _quiet = quiet


@dataclass(eq=False)
class _Work:
    """Running work. `total`: None, if the number of its items is unknown. `ends`: times of recent items."""

    what: str
    total: int | None
    started: float
    done: int = 0
    note: str = ""
    ends: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT + 1))

    def text(self, now: float) -> str:
        """`quantizing blocks: 3 of 32 done in 6 min, about 58 min left; loss 2.31`."""
        if self.total is None and not self.done:
            return f"{self.what}: {duration(now - self.started)}"
        count = f"{self.done}" if self.total is None else f"{self.done} of {self.total}"
        text = f"{self.what}: {count} done in {duration(now - self.started)}"
        if self.total is not None and 0 < self.done < self.total:
            each = (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1)
            left = max((self.total - self.done) * each - (now - self.ends[-1]), 0.0)
            text += f", about {duration(left)} left"
        return f"{text}; {self.note}" if self.note else text


class _Lines:
    """The running work, the innermost last, and the time of the last line about it."""

    def __init__(self) -> None:
        self.works: list[_Work] = []
        self.started: float | None = None  # of the heartbeat
        self.printed = 0.0
        # The heartbeat has a thread of its own. The lock is reentrant, because a garbage collection while it is held
        # may end an abandoned generator of `track`, which takes it again.
        self.lock = threading.RLock()

    @contextlib.contextmanager
    def work(self, what: str, total: int | None) -> Iterator[_Work]:
        now = _clock()
        made = _Work(what, total, now)
        made.ends.append(now)
        with self.lock:
            if not self.works and self.started is None:
                self.printed = now
            self.works.append(made)
        try:
            yield made
        finally:
            with self.lock:
                self.works.remove(made)

    def finished(self, work: _Work) -> None:
        """Called when an item of the work is done."""
        now = _clock()
        with self.lock:
            work.done += 1
            work.ends.append(now)
            if self.works[0] is work and now - max(self.printed, work.started) >= LEAST:
                self._print(now)

    def beat(self) -> None:
        """Print a line if the last one is old."""
        now = _clock()
        with self.lock:
            if now - self.printed >= MOST:
                self._print(now)

    def _print(self, now: float) -> None:
        self.printed = now
        works = dict.fromkeys(work.text(now) for work in (self.works[:1] + self.works[-1:]))
        text = " (".join(works) + ")" * (len(works) - 1) or f"at work for {duration(now - (self.started or 0.0))}"
        with contextlib.suppress(OSError, ValueError):  # a closed pipe does not end the work
            print(text, file=sys.stderr, flush=True)  # noqa: T201


_lines = _Lines()


def known_length(items: Iterable[object]) -> int | None:
    """How many items there are, if that is known without reading them.

    >>> known_length([1, 2]), known_length(number for number in [1, 2])
    (2, None)
    """
    known = operator.length_hint(items, -1)
    return None if known < 0 else known


def track(items: Iterable[T], what: str, *, fewest: int = 10, total: int | None = None) -> Iterator[T]:
    """The same items, with a bar (on a terminal, from `fewest` items on) or lines while they are processed.

    `total`: their number, if `items` does not have it; then a percentage and the remaining time are shown.
    """
    size = len(items) if isinstance(items, Sequence) else total
    items = items if _ends is None else _in_time(items)
    if _prints_lines():
        with _lines.work(what, size) as work:
            _notes.append(lambda text: setattr(work, "note", text))
            try:
                for item in items:
                    yield item
                    _lines.finished(work)
            finally:
                _notes.pop()
        return
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


def _in_time(items: Iterable[T]) -> Iterator[T]:
    for item in items:
        if _ends is not None and _clock() > _ends:
            raise OutOfTime
        yield item


@contextlib.contextmanager
def phase(what: str) -> Iterator[None]:
    """Name work whose steps are not counted, for the lines of `heartbeat`; also a decorator of a function."""
    with _lines.work(what, None):
        yield


def note(text: str) -> None:
    """Show a few words (a loss, a name) with the progress of the running work, if it is shown."""
    if _notes:
        _notes[-1](text)


@contextlib.contextmanager
def heartbeat() -> Iterator[None]:
    """Inside, a line is printed at least once a minute, also during work whose steps are not counted."""
    if not _prints_lines():
        yield
        return
    _lines.started = _lines.printed = _clock()
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(1.0):
            _lines.beat()

    thread = threading.Thread(target=beat, name="sparsebit-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        _lines.started = None


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `2 h 5 min`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    hours, rest = divmod(round(seconds / 60), 60)
    return " ".join([*([f"{hours} h"] if hours else []), *([f"{rest} min"] if rest or not hours else [])])


def _prints_lines() -> bool:
    """Under torchrun, the first process prints for all."""
    return not _quiet and not sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"
