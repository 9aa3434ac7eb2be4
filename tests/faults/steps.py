"""Every step that changes files, counted; one of them fails, or ends the process.

The steps are the calls by which `sparsebit.folders`, `sparsebit.tensor_files` and the packages that write for us
change what is on the disk. A write that fails leaves a part of its file, as a full disk does.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from safetensors import SafetensorError

from sparsebit import folders, tensor_files

_WRITING = set("wxa+")
_WRITES = ("write", "serialize_file", "copyfile")


class Steps:
    """Counts the steps inside `folder`; calls `act(name, path)` before the step of the number `at`."""

    def __init__(self, folder: Path, at: int, act: Callable[[str, Path | None], None]) -> None:
        self.folder, self.at, self.act = folder.resolve(), at, act
        self.names: list[str] = []
        self._is_inside = False  # a step that calls another one is one step

    @property
    def is_reached(self) -> bool:
        return len(self.names) >= self.at

    @contextlib.contextmanager
    def watched(self) -> Iterator[Steps]:
        with contextlib.ExitStack() as stack:
            for module, name, index in [
                (os, "mkdir", 0),
                (os, "rename", 1),
                (os, "replace", 1),
                (shutil, "copyfile", 1),
                (shutil, "copymode", 1),
                (tensor_files, "serialize_file", 1),
            ]:
                stack.enter_context(mock.patch.object(module, name, self._counted(getattr(module, name), name, index)))
            stack.enter_context(mock.patch.object(os, "fsync", self._counted(os.fsync, "fsync", None)))
            for module in (io, builtins):
                stack.enter_context(mock.patch.object(module, "open", self._counted_open(open)))
            rename = folders._renameat2()
            counted = None if rename is None else self._counted(rename, "renameat2", 3)
            stack.enter_context(mock.patch.object(folders, "_renameat2", return_value=counted))
            yield self

    def _counted(self, function: Callable[..., Any], name: str, index: int | None) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            path = None if index is None else Path(os.fsdecode(args[index]))
            return self._step(name, path, lambda: function(*args, **kwargs))

        return call

    def _counted_open(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            act = lambda: function(file, mode, *args, **kwargs)  # noqa: E731
            if isinstance(file, int) or not _WRITING & set(mode):
                return act()
            return self._step("write", Path(os.fsdecode(file)), act)

        return call

    def _step(self, name: str, path: Path | None, act: Callable[[], Any]) -> Any:
        if self._is_inside or not (path is None or self._is_ours(path)):
            return act()
        self.names.append(f"{name} {path.name if path else ''}")
        self._is_inside = True
        try:
            if len(self.names) == self.at:
                self.act(name, path)
            return act()
        finally:
            self._is_inside = False

    def _is_ours(self, path: Path) -> bool:
        return self.folder in Path(os.path.abspath(path)).parents


def fail(error: str) -> Callable[[str, Path | None], None]:
    """Fail as on a full disk ("ENOSPC"), on a broken one ("EIO") or, where bytes are written, without memory."""

    def act(name: str, path: Path | None) -> None:
        if error == "memory" and name not in _WRITES:
            return
        if name in _WRITES and path is not None:
            with open(path, "wb") as file:
                file.write(b"the first bytes")
        if error == "memory":
            raise MemoryError("no memory, by the test")
        number = getattr(errno, error)
        if name == "serialize_file":
            raise SafetensorError(f"I/O error: {os.strerror(number)} (os error {number})")
        raise OSError(number, os.strerror(number), str(path))

    return act


def kill(name: str, path: Path | None) -> None:
    """End the process as a power failure does; a file that was just begun is there in part."""
    if name in _WRITES and path is not None:
        with open(path, "wb") as file:
            file.write(b"the first bytes")
    os.kill(os.getpid(), signal.SIGKILL)
