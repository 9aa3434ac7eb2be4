"""The rooms of the package: sizes of folders, and the picture of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

HOMES = ("cli", "quantization", "sparse", "llm", "execution", "deploy", "kernels", "numerics", "config", "records")
SCRIPT = ROOT / "scripts" / "rooms.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("home", HOMES)
def test_no_folder_has_more_than_fifteen_files(home: str) -> None:
    top = ROOT / "sparsebit" / home
    sizes = {folder: len(list(folder.glob("*.py"))) for folder in (top, *filter(Path.is_dir, top.rglob("*")))}
    assert {str(folder): size for folder, size in sizes.items() if size > 15} == {}


def test_the_picture_is_in_step() -> None:
    assert run("--check").returncode == 0, "run python scripts/rooms.py"


def test_every_room_is_drawn() -> None:
    text = run("--text").stdout
    assert "planning/" in text
    assert text.index("model/") < text.index("planning/"), "a room is drawn above what it imports"
