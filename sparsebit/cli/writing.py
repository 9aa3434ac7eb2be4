"""Results on disk appear whole or not at all; what was there before stays until they do."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from sparsebit.errors import CheckpointError
from sparsebit.interrupts import deaf_to_interrupts

# What QuantModel.save() writes: a folder that holds anything else is not ours to replace.
OWN_FILES = frozenset({"model.safetensors", "sparsebit.json"})


def checked_target(folder: Path) -> Path:
    """The folder's true path if a result may stand there: asked before the work, so that no work is lost."""
    target = folder.expanduser().resolve()
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"--output {folder} is a file; give the name of a folder")
    if target.is_dir() and (foreign := sorted(set(os.listdir(target)) - OWN_FILES)):
        raise CheckpointError(
            f"--output {folder} holds other things than a saved model ({', '.join(foreign[:3])}); give another folder"
        )
    above = next(parent for parent in target.parents if parent.exists())
    if not os.access(above, os.W_OK | os.X_OK) or not above.is_dir():
        raise CheckpointError(f"--output {folder}: {above} cannot be written to; give another folder")
    return target


@contextlib.contextmanager
def replacing_folder(target: Path) -> Iterator[Path]:
    """An empty folder beside `target` to write into; it takes the place of `target` when the block ends well."""
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = _beside(target)
    beside.mkdir()
    try:
        yield beside
        with deaf_to_interrupts():
            _swap(beside, target)
    finally:
        with deaf_to_interrupts():
            shutil.rmtree(beside, ignore_errors=True)


def replace_text(target: Path, text: str) -> None:
    """`text` as the whole of the file `target`."""
    beside = _beside(target)
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)


def _swap(new: Path, target: Path) -> None:
    """`new` takes the name of `target`; a folder of that name goes."""
    if not target.exists():
        os.rename(new, target)
        return
    old = _beside(target)
    os.rename(target, old)
    try:
        os.rename(new, target)
    except BaseException:
        os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _beside(target: Path) -> Path:
    # The same folder, hence the same file system: only there a rename is one step.
    return target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}"
