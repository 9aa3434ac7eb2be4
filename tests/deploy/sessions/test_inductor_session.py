"""A package with other bytes than its checksums say is refused: it holds machine code."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from sparsebit.deploy.sessions.runtime_sessions import open_session
from sparsebit.errors import DeploymentError


def package(tmp_path: Path) -> Path:
    file = tmp_path / "m.pt2"
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("m/data/aotinductor/model/code.so", b"machine code" * 50)
        made.writestr("m/archive_format", "pt2")
    return file


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    file = package(tmp_path)
    file.write_bytes(file.read_bytes().replace(b"machine code", b"machine c0de", 1))
    with pytest.raises(DeploymentError, match=r"m\.pt2 does not load in AOTInductor: it is damaged in .*code\.so"):
        open_session(file, "aot_inductor")


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_cut_or_foreign_file(share: float, tmp_path: Path) -> None:
    file = package(tmp_path)
    data = file.read_bytes()
    for content in (data[: int(share * len(data))], b"hello world" * 30):
        file.write_bytes(content)
        with pytest.raises(DeploymentError, match=r"m\.pt2 does not load in AOTInductor: it is damaged, or not a .pt2"):
            open_session(file, "aot_inductor")
