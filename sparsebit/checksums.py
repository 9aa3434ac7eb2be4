"""Checksums of files.

SHA-256 identifies a file. CRC-32 also detects damage, and on a CPU without instructions for SHA-256 it is ten times
faster (2.9 against 0.28 GB a second on one thread of a Xeon at 2.5 GHz), so weights of language models use it.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from pathlib import Path

_CHUNK = 1 << 22


def sha256_of(*paths: Path) -> str:
    """SHA-256 of the bytes of the files, one file after another."""
    found = hashlib.sha256()
    for path in paths:
        for chunk in _chunks(path):
            found.update(chunk)
    return found.hexdigest()


def crc32_of(path: Path) -> str:
    """CRC-32 of the bytes of a file, as 8 hexadecimal digits."""
    total = 0
    for chunk in _chunks(path):
        total = zlib.crc32(chunk, total)
    return f"{total:08x}"


def _chunks(path: Path) -> Iterator[memoryview]:
    """The bytes of a file; each chunk is valid until the next one is read."""
    buffer = memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            yield buffer[:count]
