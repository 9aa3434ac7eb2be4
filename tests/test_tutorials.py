"""The commands of the tutorials run, in their order, with the files that the page says to save."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

FILE = re.compile(r'^```python title="(?P<name>[\w.]+)"\n(?P<text>.*?)^```$', re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHIM = "from tests import torchvision_shim\ntorchvision_shim.install()\n"  # as conftest.py does for the tests
PAGES = [page for page in sorted((ROOT / "docs" / "tutorials").glob("*.md")) if FILE.search(page.read_text("utf-8"))]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_run(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for file in FILE.finditer(text):
        (tmp_path / file["name"]).write_text(file["text"], encoding="utf-8")
    (tmp_path / "shim").mkdir()
    (tmp_path / "shim" / "sitecustomize.py").write_text(SHIM)
    paths = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path / "shim")]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    for commands in COMMANDS.findall(text):
        run = subprocess.run(
            ["bash", "-ec", commands], cwd=tmp_path, env=os.environ | paths, capture_output=True, text=True
        )
        assert run.returncode == 0, f"{commands}\n{run.stderr}"


def test_every_tutorial_is_in_the_navigation() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [
        page.name for page in (ROOT / "docs" / "tutorials").glob("*.md") if f"tutorials/{page.name}" not in site
    ] == []
