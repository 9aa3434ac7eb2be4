"""`checksums.json` of a model folder: detects changed bits on the disk when the files are loaded.

CRC-32 does not prove who wrote a file. Folders of other tools have no such file, and are not checked.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sparsebit.checksums import crc32_of
from sparsebit.errors import CheckpointError
from sparsebit.folders import flush, write_text

log = logging.getLogger(__name__)
CHECKSUMS = "checksums.json"
_FORMAT, _MOST_THREADS = 1, 8
_WEIGHTS = (".safetensors", ".safetensors.index.json")


def write_checksums(folder: Path) -> None:
    """Write `checksums.json` for all files in the folder, and flush them all to the disk."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name != CHECKSUMS)
    files = _facts(folder, names)
    text = json.dumps({"format": _FORMAT, "files": files, "crc32": _of_entries(files)}, indent=1) + "\n"
    write_text(folder / CHECKSUMS, text)
    for name in (*names, CHECKSUMS):
        flush(folder / name)
    flush(folder)


def check_files(folder: Path) -> None:
    """Compare the files of a folder with its `checksums.json`, if it has one.

    Weights that differ are an error. Other files, such as config.json and the tokenizer, are edited by users:
    differences cause a warning.
    """
    path = folder / CHECKSUMS
    if not path.is_file():
        return
    known = _read(path)
    present = [name for name in known if (folder / name).is_file()]
    try:
        found = _facts(folder, present)
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read ({error})") from None
    changed = [name for name in present if found[name] != known[name]]
    damaged = [name for name in changed if name.endswith(_WEIGHTS)]
    damaged += [name for name in known if name.endswith(_WEIGHTS) and name not in found]
    if damaged:
        raise CheckpointError(
            f"{', '.join(str(folder / name) for name in damaged)}: damaged or missing (the checksum in {CHECKSUMS} "
            f"differs); take the file from a copy or write the folder again. If it was changed on purpose, remove "
            f"{CHECKSUMS}"
        )
    for name in changed:
        log.warning("%s has changed since the folder was written (%s)", folder / name, CHECKSUMS)


def fingerprint(folder: Path, files: Iterable[Path], settings: Mapping[str, Any]) -> str:
    """One value for all bytes of `files` in `folder` and for `settings`, to identify a model."""
    facts = _facts(folder, sorted({path.name for path in files}))
    return hashlib.sha256(json.dumps([facts, settings], sort_keys=True).encode()).hexdigest()


def _facts(folder: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Size and checksum of files, several at once, which makes both reading and summing faster."""
    if not names:
        return {}
    with ThreadPoolExecutor(min(len(names), _MOST_THREADS, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(lambda name: _fact(folder / name), names), strict=True))


def _fact(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "crc32": crc32_of(path)}


def _read(path: Path) -> dict[str, dict[str, Any]]:
    advice = f"remove it to load the folder without comparing checksums, or write {path.parent} again"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        version, files, own = found["format"], found["files"], found["crc32"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error!r}); {advice}") from None
    if version != _FORMAT:
        raise CheckpointError(f"{path} has format {version!r}; this version reads {_FORMAT}; {advice}")
    if not isinstance(files, dict) or own != _of_entries(files):
        raise CheckpointError(f"{path} is damaged (its own checksum differs); {advice}")
    return files


def _of_entries(files: Mapping[str, Mapping[str, Any]]) -> str:
    return f"{zlib.crc32(json.dumps(files, sort_keys=True).encode()):08x}"
