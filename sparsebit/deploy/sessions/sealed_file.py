"""A checksum behind the end of a program: runtimes ignore it, and trust what is damaged (some abort the process)."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

from sparsebit.checksums import crc32_of
from sparsebit.errors import DeploymentError

_MARK = b"sparsebit-crc32:"
_SEAL = re.compile(re.escape(_MARK) + rb"([0-9a-f]{8})\Z")


def seal(path: Path) -> None:
    """Append the checksum of the file."""
    checksum = crc32_of(path)
    with path.open("ab") as file:
        file.write(_MARK + checksum.encode())


def require_whole(data: bytes, name: str) -> None:
    """Raise if the bytes of a sealed file have changed; a file of another tool has no seal."""
    found = _SEAL.search(data, max(0, len(data) - len(_MARK) - 8))
    if found is not None and f"{zlib.crc32(memoryview(data)[: found.start()]):08x}" != found[1].decode():
        raise DeploymentError(f"{name} is damaged: its bytes do not have the checksum behind them; write it again")
