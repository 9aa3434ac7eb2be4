"""A changed byte of a sealed file is found, wherever it is; files without a seal are not judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsebit.deploy.sessions.runtime_sessions import open_session
from sparsebit.deploy.sessions.sealed_file import require_whole, seal
from sparsebit.errors import DeploymentError

CONTENT = bytes(range(256)) * 3


def sealed(tmp_path: Path) -> bytes:
    file = tmp_path / "m.pte"
    file.write_bytes(CONTENT)
    seal(file)
    return file.read_bytes()


def test_a_whole_file(tmp_path: Path) -> None:
    data = sealed(tmp_path)
    assert data.startswith(CONTENT) and len(data) == len(CONTENT) + 24
    require_whole(data, "m.pte")
    require_whole(CONTENT, "m.pte")  # of another tool
    require_whole(b"", "m.pte")


@pytest.mark.parametrize("place", [0, 100, len(CONTENT) - 1])
def test_a_changed_byte(place: int, tmp_path: Path) -> None:
    data = bytearray(sealed(tmp_path))
    data[place] ^= 1
    with pytest.raises(DeploymentError, match=r"m\.pte is damaged"):
        require_whole(bytes(data), "m.pte")


def test_a_missing_or_an_added_part(tmp_path: Path) -> None:
    data = sealed(tmp_path)
    for changed in (data[10:], data[:50] + data[60:], b"more" + data):
        with pytest.raises(DeploymentError, match="is damaged"):
            require_whole(changed, "m.pte")


@pytest.mark.parametrize("runtime", ["executorch", "litert"])
def test_a_damaged_program_is_refused_before_its_runtime_reads_it(runtime: str, tmp_path: Path) -> None:
    file = tmp_path / "m"
    file.write_bytes(b"\0\0\0\0TFL3" + CONTENT)
    seal(file)
    data = file.read_bytes()
    with pytest.raises(DeploymentError, match="the program is damaged"):
        open_session(data[:20] + b"?" + data[21:], runtime)
