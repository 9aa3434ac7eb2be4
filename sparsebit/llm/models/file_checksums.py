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
    """Compare with `checksums.json`, if there is one: changed weights are an error, files that users edit a warning."""
    path = folder / CHECKSUMS
    if not path.is_file():
        return
    known = _read(path)
    present = [name for name in known if (folder / name).is_file()]
    try:
        found = _facts(folder, present)
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read ({error})") from None
    changed = [name for name in known if found.get(name) != known[name]]
    damaged = [name for name in changed if name.endswith(_WEIGHTS)]
    if damaged:
        raise CheckpointError(
            f"{', '.join(str(folder / name) for name in damaged)}: damaged or missing (the checksum in {CHECKSUMS} "
            f"differs); copy the file or write the folder again. If it was changed on purpose, remove {CHECKSUMS}"
        )
    for name in changed:
        if name in found:
            log.warning("%s has changed since the folder was written (%s)", folder / name, CHECKSUMS)


def fingerprint(folder: Path, files: Iterable[Path], settings: Mapping[str, Any]) -> str:
    """One value for all bytes of `files` in `folder` and for `settings`, to identify a model."""
    facts = _facts(folder, sorted({path.name for path in files}))
    return hashlib.sha256(json.dumps([facts, settings], sort_keys=True).encode()).hexdigest()


def _facts(folder: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Size and checksum of files, several at once, which makes both reading and summing faster."""
    if not names:
        return {}

    def fact(name: str) -> dict[str, Any]:
        return {"bytes": (folder / name).stat().st_size, "crc32": crc32_of(folder / name)}

    with ThreadPoolExecutor(min(len(names), _MOST_THREADS, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(fact, names), strict=True))


def _read(path: Path) -> dict[str, dict[str, Any]]:
    files: dict[str, dict[str, Any]] = {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        version, files, own = found["format"], found["files"], found["crc32"]
        problem = "" if own == _of_entries(files) else "is damaged (its own checksum differs)"
        problem = problem if version == _FORMAT else f"has format {version!r}; this version reads {_FORMAT}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"cannot be read ({error!r})"
    if problem:
        advice = f"remove it to load the folder without comparing checksums, or write {path.parent} again"
        raise CheckpointError(f"{path} {problem}; {advice}")
    return files


def _of_entries(files: Mapping[str, Mapping[str, Any]]) -> str:
    return f"{zlib.crc32(json.dumps(files, sort_keys=True).encode()):08x}"
