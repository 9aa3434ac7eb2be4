"""Reads what native code writes to the process's output streams, which Python's own redirection does not see."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator

_STREAMS = threading.Lock()


@contextlib.contextmanager
def native_output_read() -> Iterator[Callable[[], str]]:
    """Inside, what native code writes to the output streams goes to a file; the function returns it."""
    with _STREAMS, tempfile.TemporaryFile() as file:
        streams = (sys.stdout, sys.stderr)
        for stream in streams:
            stream.flush()
        kept = [os.dup(number) for number in (1, 2)]

        def read() -> str:
            file.seek(0)
            return file.read().decode("utf-8", errors="replace")

        try:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
            yield read
        finally:
            for stream in streams:
                stream.flush()
            for number, old in zip((1, 2), kept, strict=True):
                os.dup2(old, number)
                os.close(old)
