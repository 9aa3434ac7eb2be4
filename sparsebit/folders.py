"""Staging folders next to a target, in which a result is completed before it replaces the target; file locks.

Invariant: a target is at every moment the old result, the new result, or absent, never half of one, also after a full
disk, an exception or SIGKILL. So everything is written into a hidden folder on the same file system, flushed, and put
in place by one rename. A folder in use is locked (`flock`); the system releases the lock when its process ends, even by
SIGKILL, so the next run recognises the folders of killed runs and removes them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sparsebit.errors import ConfigError
from sparsebit.interrupts import ignored_interrupts

_MARK = ".sparsebit-"
_AT_FDCWD, _RENAME_NOREPLACE, _RENAME_EXCHANGE = -100, 1, 2  # linux/fcntl.h, linux/fs.h


@contextlib.contextmanager
def staging_folder(target: Path, *, inside: bool = False, alone: bool = False) -> Iterator[Path]:
    """An empty hidden folder next to `target` (or `inside` it), which is removed when the block ends.

    It is next to the target because a rename is atomic only within a file system. Folders of killed runs are removed.
    Missing parent folders are created, and removed again if nothing was put into them. `alone`: a target
    that another process is currently writing is an error.
    """
    parent = target if inside else target.parent
    above = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(target, parent)
    for used in filter(_is_in_use, _staging_folders(target, parent) if alone else ()):
        raise ConfigError(f"another process is writing {target} now (in {used}); wait, or choose another output")
    folder, lock = _made(parent, f".{target.name}{_MARK}")
    try:
        yield folder
    finally:
        with ignored_interrupts():
            shutil.rmtree(folder, ignore_errors=True)
            if lock is not None:
                os.close(lock)
            for one in above:
                with contextlib.suppress(OSError):  # not empty: the result is in it
                    one.rmdir()


@contextlib.contextmanager
def staged_result(target: Path) -> Iterator[Path]:
    """A path to write a file or a folder to, which then replaces `target` in one step.

    It is in a hidden folder next to the target; after an exception or a kill the target is as it was.
    """
    target = target.resolve()  # what a link points to is replaced, not the link
    with staging_folder(target) as folder:
        made = folder / target.name
        yield made
        for path in (made, *made.rglob("*")) if made.is_dir() else (made,):
            flush(path)
        with ignored_interrupts():
            if made.is_file():
                os.replace(made, target)
            elif not target.exists():
                put_in_place(made, target)
            elif not exchange(made, target):  # the older folder is removed with the staging folder
                os.rename(target, folder / "older")
                os.rename(made, target)
            flush(target.parent)


def remove_abandoned(target: Path, parent: Path) -> None:
    """Remove the staging folders for `target` in `parent` whose process has ended."""
    with contextlib.suppress(OSError):
        for folder in _staging_folders(target, parent):
            with contextlib.suppress(OSError), alone_in(folder) as has_locks:
                if has_locks:
                    shutil.rmtree(folder, ignore_errors=True)


def is_staging_folder(name: str) -> bool:
    """Whether a file name is that of a staging folder."""
    return re.fullmatch(rf"\..*{re.escape(_MARK)}[0-9a-f]{{16}}", name) is not None


def exchange(first: Path, second: Path) -> bool:
    """Swap two files or folders in one step; False, without any change, if the system cannot."""
    rename = _renameat2()
    names = _AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second)
    return rename is not None and bool(rename(*names, _RENAME_EXCHANGE) == 0)


def put_in_place(made: Path, target: Path) -> None:
    """Rename a completed result to `target`; if `target` exists by now, it is kept, and an error is raised."""
    rename = _renameat2()
    with ignored_interrupts():
        if rename is not None:
            if rename(_AT_FDCWD, os.fsencode(made), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE) == 0:
                return
            number = ctypes.get_errno()
            if number not in (errno.EEXIST, errno.EINVAL, errno.ENOSYS):
                raise OSError(number, os.strerror(number), str(target))
        if os.path.lexists(target):
            why = "was created by something else during this run; that is kept, and the result of this run is not"
            raise ConfigError(f"output {target} {why}; choose another output")
        os.rename(made, target)  # the file system has no rename that fails if the target exists


def unwritable(path: Path, example: str) -> str:
    """Why no file can be written at `path`; empty if one can. `example`: the name of a file in a folder."""
    folder = path.resolve().parent
    if path.is_dir():
        return f"{path} is a folder; name a file in it, such as {path / example}"
    if not folder.is_dir():
        return f"{path}: the folder {folder} does not exist; create it first"
    return "" if os.access(folder, os.W_OK) else f"{path}: the folder {folder} cannot be written to; choose another"


def need_new(target: Path) -> None:
    """Raise for an output that exists, also as a link to nothing."""
    if os.path.lexists(target):
        raise ConfigError(f"output {target} exists; remove it or choose another folder")


def write_text(path: Path, text: str) -> None:
    """`text` as the whole of the file; an error, such as of a full disk, names the file."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def replace_text(target: Path, text: str) -> None:
    """Replace the whole file by `text` in one step: a process that reads it meanwhile sees the old or the new text."""
    if target.exists() and not target.is_file():  # a device or a pipe, such as /dev/stdout
        write_text(target, text)
        return
    replace_file(target, lambda made: write_text(made, text))


def replace_file(target: Path, write: Callable[[Path], object]) -> None:
    """Have `write(path)` create a file, which replaces `target` in one step when it is on the disk."""
    target = target.resolve()  # replace the target of a link, not the link
    with staging_folder(target) as folder:
        made = folder / target.name
        write(made)
        flush(made)
        with ignored_interrupts():
            os.replace(made, target)
            flush(target.parent)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Only one process at a time runs the block for this folder; without effect if the file system has no locks."""
    with alone_in(folder, wait=True):
        yield


def flush(path: Path) -> None:
    """Write a file, or the names in a folder, through to the disk.

    An error is raised for a file, and ignored for a folder: some file systems cannot flush folders, and the result
    already has its name.
    """
    with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


@contextlib.contextmanager
def alone_in(folder: Path, *, wait: bool = False) -> Iterator[bool]:
    """Inside, no other process can enter for the same folder: BlockingIOError if one is inside, unless `wait` is set.

    When a process ends, even by a kill, the folder is free again. Yields whether there is a lock: on a system without
    file locks nothing is checked.
    """
    lock = _lock(folder, wait=wait)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            os.close(lock)


def _staging_folders(target: Path, parent: Path) -> list[Path]:
    """The staging folders for `target` in `parent`, in use or not."""
    pattern = re.compile(re.escape(f".{target.name}{_MARK}") + r"[0-9a-f]{16}")
    return [parent / name for name in os.listdir(parent) if pattern.fullmatch(name)]


def _is_in_use(folder: Path) -> bool:
    try:
        with alone_in(folder):
            return False
    except BlockingIOError:
        return True
    except OSError:  # removed in the meantime
        return False


def _made(parent: Path, prefix: str) -> tuple[Path, int | None]:
    """A new folder and its lock; None on a file system without locks."""
    for _ in range(100):
        folder, lock = parent / f"{prefix}{secrets.token_hex(8)}", None
        folder.mkdir()
        with contextlib.suppress(OSError):
            lock = _lock(folder, wait=False)
        if folder.is_dir():  # otherwise another run removed it as abandoned, just before it was locked
            return folder, lock
        if lock is not None:
            os.close(lock)
    raise OSError(f"{parent}: folders that are created there disappear at once")


def _lock(folder: Path, *, wait: bool) -> int | None:
    """A descriptor that holds the folder's lock; None without locks; BlockingIOError if another process has it."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        os.close(number)
        if isinstance(error, BlockingIOError):
            raise
        return None  # a file system without locks
    return number


@functools.cache
def _renameat2() -> Callable[..., Any] | None:
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
