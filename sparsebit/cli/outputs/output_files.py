"""Writes results: completely or not at all; an older result is kept until then."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from sparsebit import folders
from sparsebit.errors import CheckpointError
from sparsebit.quantization.saving.checkpoint import foreign_files


def checked_target(folder: Path) -> Path:
    """The folder's true path if a result may be written there; checked before the work, so that no work is lost."""
    target = folder.expanduser().resolve()
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"--output {folder} is a file; give the name of a folder")
    if target.is_dir() and (foreign := foreign_files(target)):
        held = ", ".join(foreign[:3])
        raise CheckpointError(f"--output {folder} holds other things than a saved model ({held}); give another folder")
    above = target if target.is_dir() else next(parent for parent in target.parents if parent.exists())
    if not os.access(above, os.W_OK | os.X_OK) or not above.is_dir():
        raise CheckpointError(f"--output {folder}: {above} cannot be written to; give another folder")
    return target


def need_own_text(file: Path, *starts: str) -> None:
    """Raise, before the work, for a file that is not an older result: those begin with one of `starts`."""
    target = file.expanduser()
    if not target.is_file() or not target.stat().st_size:
        return
    with target.open(encoding="utf-8", errors="replace") as stream:
        begin = stream.read(max(map(len, starts)))
    if not begin.startswith(starts):
        fault = "exists and is not an older result of this verb; give another name, or remove it"
        raise CheckpointError(f"--output {file} {fault}")


def replace_text(file: Path, text: str) -> None:
    """Replace the whole content of the file by `text`."""
    target = file.expanduser().resolve()  # replace the target of a link, not the link
    if target.is_dir():
        raise CheckpointError(f"--output {file} is a folder; name a file in it")
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file.parent))
    folders.replace_text(target, text)
