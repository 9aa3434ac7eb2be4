"""`ignored_interrupts`: short sections in which Ctrl-C and SIGTERM are ignored."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def ignored_interrupts() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM are ignored: for short work that must not be interrupted, such as a rename."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
