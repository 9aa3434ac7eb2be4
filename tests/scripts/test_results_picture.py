"""The picture of results and the READMEs' table say what benchmarks/results says."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from tests.conftest import ROOT


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("results_picture")


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "results_picture.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_picture_is_in_step() -> None:
    done = run("--check")
    assert done.returncode == 0, done.stderr


def test_picture_that_is_out_of_step_is_named(tmp_path: Path) -> None:
    old = tmp_path / "old.svg"
    old.write_text("<svg/>")
    done = run("--check", "--picture", old)
    assert done.returncode == 1 and "old.svg is out of step: run python scripts/results_picture.py" in done.stderr
    assert old.read_text() == "<svg/>"
    assert run("--picture", old).returncode == 0
    assert old.read_text() == (ROOT / "docs" / "assets" / "results.svg").read_text()


def test_bars_are_as_long_as_their_values(script: ModuleType) -> None:
    bars = (script.Bar("ours", 3.0, "3", "ours"), script.Bar("a < b", 1.5, "1.5", "theirs"))
    drawn = ElementTree.fromstring(script.picture([script.Panel("title", "unit", bars)]))
    name = "{http://www.w3.org/2000/svg}"
    lengths = [int(rect.attrib["width"]) for rect in drawn.iter(f"{name}rect") if rect.get("class") != "card"]
    assert lengths == [script.BAR, script.BAR // 2]
    assert [text.text for text in drawn.iter(f"{name}text")] == ["title", "unit", "ours", "3", "a < b", "1.5"]


@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md"])
def test_table_of_the_readme_has_the_figures(script: ModuleType, readme: str) -> None:
    lines = (ROOT / readme).read_text(encoding="utf-8").splitlines()
    expected = script.figures(script.Results(ROOT / "benchmarks" / "results"))
    first = next(number for number, line in enumerate(lines) if line.startswith("| ResNet-20"))
    for line, figures in zip(lines[first:], expected, strict=False):
        position = 0
        for figure in figures:
            position = line.find(figure, position) + 1
            assert position, f"{figure} is missing, or in another order: {line}"
