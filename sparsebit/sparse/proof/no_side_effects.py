"""Runs that must not reach outside: a branch that is forced may write a file or start a program."""

from __future__ import annotations

import ast
import contextlib
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

_STATE = threading.local()
_IS_WATCHED: list[bool] = []
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_REFUSED = ("os.", "shutil.", "subprocess.", "socket.", "tempfile.", "urllib.", "ftplib.", "http.")
_HARMLESS = frozenset(("os.listdir", "os.scandir", "os.fwalk", "os.walk", "os.getxattr", "os.listxattr"))
_NAMES = frozenset((
    "open", "save", "save_file", "savez", "savetxt", "savefig", "dump", "write", "write_text", "write_bytes", "imsave",
    "imwrite", "mkdir", "makedirs", "unlink", "remove_file", "rmtree", "system", "exit", "_exit", "kill", "send",
    "all_reduce", "barrier", "broadcast", "input", "breakpoint", "set_trace", "sleep", "save_image", "to_csv",
))  # fmt: skip


def writes(code: Iterable[ast.AST]) -> bool:
    """Whether code calls something that writes, sends, waits or ends the program, by its name."""
    calls = (node.func for part in code for node in ast.walk(part) if isinstance(node, ast.Call))
    return any(getattr(name, "attr", getattr(name, "id", "")) in _NAMES for name in calls)


@contextlib.contextmanager
def no_side_effects() -> Iterator[None]:
    """While it is open, this thread cannot write files, start programs or connect: PermissionError."""
    if not _IS_WATCHED:
        sys.addaudithook(_refuse)  # it cannot be removed, so it is added once, and does nothing outside of this context
        _IS_WATCHED.append(True)
    _STATE.is_closed = True
    try:
        yield
    finally:
        _STATE.is_closed = False


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    if not getattr(_STATE, "is_closed", False):
        return
    is_write = event == "open" and (not set("wax+").isdisjoint(args[1] or "") or bool((args[2] or 0) & _WRITING))
    if is_write or (event.startswith(_REFUSED) and event not in _HARMLESS):
        raise PermissionError(f"{event}: a trial run of a model must not reach outside")
