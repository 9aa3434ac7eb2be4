from __future__ import annotations

import hashlib
import zlib
from pathlib import Path

import pytest

from sparsebit.checksums import crc32_of, sha256_of


@pytest.mark.parametrize("size", [0, 5, 1 << 22, (1 << 22) + 1])
def test_of_whole_files(tmp_path: Path, size: int) -> None:
    content = bytes(index * 37 % 251 for index in range(251)) * (size // 251 + 1)
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(content[:size])
    second.write_bytes(b"more")
    assert crc32_of(first) == f"{zlib.crc32(content[:size]):08x}"
    assert sha256_of(first, second) == hashlib.sha256(content[:size] + b"more").hexdigest()
