"""A model as a folder: `model.safetensors` (every tensor) and `sparsebit.json` (everything else that is needed).

The folder describes itself, and holds neither code nor pickled data. The invariant: at any moment, also after a kill,
the folder is either the older model or the new one. The files are completed in a hidden folder next to it, and the two
folders are swapped by one call of the system. If they cannot be swapped (the folder holds other files, is the current
one or a mount point, or the system has no such call), the files change one by one: the new manifest comes first, and
until the new tensors are in place, readers find them under a name that contains the manifest's key.

This file knows nothing about models; `store.py` makes the description and the tensors.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sparsebit.checksums import sha256_of
from sparsebit.errors import CheckpointError
from sparsebit.folders import exchange, flush, is_staging_folder, locked, remove_abandoned, staging_folder
from sparsebit.interrupts import ignored_interrupts
from sparsebit.quantization.saving import manifest
from sparsebit.tensor_files import save_tensors, without_ties

TENSORS, MANIFEST = "model.safetensors", manifest.NAME
_PENDING = f".{TENSORS}."
_PATIENCE_S = 60.0
_LARGEST_HEADER = 100_000_000  # the format's own limit
_PLAIN = (bool, int, float, str, type(None))


def write(folder: str | os.PathLike[str], description: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Create the folder, or replace the saved model in it; other files in it stay."""
    path = Path(folder)
    target = path.resolve()  # replace the target of a link, not the link
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{path} is a file; save() writes a folder: give another name")
    distinct, aliases = without_ties(tensors)
    key = secrets.token_hex(8)
    # The hidden folder is in the target itself only where nothing may be created next to it.
    inside = target.is_dir() and not os.access(target.parent, os.W_OK | os.X_OK)
    try:
        with staging_folder(target, inside=inside) as staged:
            save_tensors(distinct, staged / TENSORS, {"key": key})
            files = {TENSORS: {"bytes": (staged / TENSORS).stat().st_size, "sha256": sha256_of(staged / TENSORS)}}
            (staged / MANIFEST).write_text(manifest.written(description, key, aliases, files), encoding="utf-8")
            for file in (staged / TENSORS, staged / MANIFEST, staged):
                flush(file)
            with ignored_interrupts():
                _publish(staged, target, key)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be written ({error}); what was there before is unchanged") from error
    return path


def read(folder: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The checked description and tensors of a folder. Read again if another process saves into it at the same time."""
    path = Path(folder)
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        before = _state(path)
        try:
            return _read(path)
        except CheckpointError:
            if _state(path) == before or time.monotonic() > deadline:
                raise


def foreign_files(folder: Path) -> list[str]:
    """Files in the folder that belong neither to a saved model nor to a save() that was killed."""
    return sorted(
        name
        for name in os.listdir(folder)
        if name not in (TENSORS, MANIFEST) and not name.startswith(_PENDING) and not is_staging_folder(name)
    )


def encode(value: Any) -> Any:
    """A nest of tensors as JSON, without data: `{"tensor": [2, 3], "dtype": "float32"}`; None if that is impossible."""
    with contextlib.suppress(TypeError):
        return _encode(value)
    return None


def decode(value: Any) -> Any:
    """The value that `encode` turned into JSON, with tensors on the meta device."""
    try:
        return _decode(value)
    except (AttributeError, IndexError, KeyError, RuntimeError, StopIteration, TypeError, ValueError) as error:
        raise CheckpointError(f"the saved example of a call is damaged ({error!r}); give example_inputs") from None


def _encode(value: Any) -> dict[str, Any]:
    if isinstance(value, Tensor):
        return {"tensor": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if type(value) is dict and all(isinstance(name, str) for name in value):
        return {"dict": {name: _encode(item) for name, item in value.items()}}
    if type(value) in (tuple, list):
        return {type(value).__name__: [_encode(item) for item in value]}
    if type(value) in _PLAIN:
        return {"value": value}
    raise TypeError(type(value))


def _decode(value: Any) -> Any:
    match value:
        case None:
            return None
        case {"tensor": shape, "dtype": dtype}:
            return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        case {"dict": items}:
            return {name: _decode(item) for name, item in items.items()}
        case {"tuple": items}:
            return tuple(map(_decode, items))
        case {"list": items}:
            return list(map(_decode, items))
        case _:
            return value["value"]


def _publish(staged: Path, target: Path, key: str) -> None:
    """Move the two files to `target`; at any moment either the older model or the new one is there."""
    if not target.exists():
        with contextlib.suppress(OSError):  # another process has just made it
            os.rename(staged, target)
            flush(target.parent)
            return
    if staged.parent != target and not foreign_files(target) and not _is_current(target):
        _copy_rights(target, staged)
        if exchange(staged, target):
            flush(target.parent)
            return
    with locked(target):
        _settle(target)
        pending = target / f"{_PENDING}{key}"
        try:
            _move(staged / TENSORS, pending)
            _move(staged / MANIFEST, target / f"{_PENDING}{key}.json")
            flush(target)
            os.replace(target / f"{_PENDING}{key}.json", target / MANIFEST)  # from here on the new model is valid
            flush(target)
            os.replace(pending, target / TENSORS)
            flush(target)
        finally:
            _settle(target)


def _settle(target: Path) -> None:
    """Finish a save() that was killed: move the tensors that belong to the manifest into place, and delete others."""
    remove_abandoned(target, target)
    with contextlib.suppress(CheckpointError):
        pending = target / f"{_PENDING}{manifest.read(target / MANIFEST)['key']}"
        if pending.is_file():
            os.replace(pending, target / TENSORS)
    for file in target.glob(f"{_PENDING}*"):
        file.unlink(missing_ok=True)


def _is_current(folder: Path) -> bool:
    """Whether the folder is this process's current folder, which would still refer to the old one after a swap."""
    with contextlib.suppress(OSError):
        return os.path.samefile(folder, os.curdir)
    return False


def _copy_rights(source: Path, target: Path) -> None:
    shutil.copymode(source, target)
    with contextlib.suppress(OSError, AttributeError):  # only root may do this; Windows has no such function
        os.chown(target, source.stat().st_uid, source.stat().st_gid)


def _move(source: Path, target: Path) -> None:
    try:
        os.replace(source, target)
    except OSError:  # another file system, as below a mount point
        shutil.copyfile(source, target)
        flush(target)


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    description = manifest.read(folder / MANIFEST)
    key, path = description["key"], folder / TENSORS
    if (pending := folder / f"{_PENDING}{key}").is_file():
        path = pending
    fault = ""
    try:
        if not path.is_file():
            fault = "is missing"
        elif (found := _key_of(path)) not in (key, None):
            fault = f"and {MANIFEST} come from different savings"
        elif found is None or sha256_of(path) != description["files"][TENSORS]["sha256"]:
            fault = f"is damaged (it is not the file that {MANIFEST} was written with: its checksum differs)"
        else:
            tensors = load_file(path)
            return description, tensors | {name: tensors[other] for name, other in description["aliases"].items()}
    except (SafetensorError, OSError, KeyError, ValueError, RuntimeError) as error:
        fault = f"is damaged ({error})"
    raise CheckpointError(f"{path} {fault}; save the model again, or take the file from a copy")


def _state(folder: Path) -> list[tuple[Any, ...]]:
    """A description of the files in the folder, used to detect a change."""
    with contextlib.suppress(OSError):
        found = [(entry.name, entry.stat()) for entry in os.scandir(folder)]
        return sorted((name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in found)
    return []


def _key_of(path: Path) -> str | None:
    """The key in the header of a safetensors file; "" if it has none, None if the header cannot be read."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, _LARGEST_HEADER)))
        return str(header.get("__metadata__", {}).get("key", ""))
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
