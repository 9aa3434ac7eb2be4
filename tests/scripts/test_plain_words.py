"""Mannered words are counted in prose and in messages, not in code; the documentation keeps the limit."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import ROOT

SCRIPT = ROOT / "scripts" / "plain_words.py"


@pytest.fixture
def plain_words(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("plain_words")


def words_of_page(plain_words: ModuleType, folder: Path, text: str) -> list[tuple[int, str]]:
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return [(hit.line, hit.words) for hit in plain_words.hits(plain_words.markdown("docs", page))]


def words_of_source(plain_words: ModuleType, folder: Path, code: str) -> list[tuple[str, int, str]]:
    file = folder / "module.py"
    file.write_text(code, encoding="utf-8")
    return [(text.kind, hit.line, hit.words) for text in plain_words.source(file) for hit in plain_words.hits(text)]


def test_documentation_keeps_the_limit() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--list", "--check", "docs"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


class TestPages:
    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("A layer stands beside it.", ["stands", "beside"]),
            ("This is no ONNX file.", ["is no"]),
            ("They are no tensors. It came about.", ["are no", "came about"]),
            ("Somebody gives it away, in words.", ["Somebody", "gives", "in words"]),
            ("Of these, none works.", ["Of these, none"]),
            ("It runs. What counts is time.", ["What counts is"]),
            ("- What it does: nothing.", ["What it does:"]),
            ("Needed is more.", ["Needed is more"]),
        ],
        ids=str,
    )
    def test_found(self, plain_words: ModuleType, tmp_path: Path, text: str, words: list[str]) -> None:
        assert [word for _, word in words_of_page(plain_words, tmp_path, text)] == words

    @pytest.mark.parametrize(
        "text",
        [
            "It is no longer slow. There is no network. Of course it works. What is a site?",
            "## What you see",
            "The figure `gives` [link](beside.md) and https://told.example/mend",
            "```text\nnobody\n```",
            "<!-- begin: zoo -->\nnobody\n<!-- end: zoo -->",
        ],
        ids=str,
    )
    def test_not_found(self, plain_words: ModuleType, tmp_path: Path, text: str) -> None:
        assert words_of_page(plain_words, tmp_path, text) == []

    def test_lines_are_those_of_the_page(self, plain_words: ModuleType, tmp_path: Path) -> None:
        text = "one\n\n```python\nx = 1\n```\n\n<!-- begin: a -->\n\n<!-- end: a -->\nIt tells all.\n"
        assert words_of_page(plain_words, tmp_path, text) == [(10, "tells")]


class TestSource:
    def test_kinds(self, plain_words: ModuleType, tmp_path: Path) -> None:
        code = (
            '"""It gives a number."""\n'
            "def f(x):\n"
            '    """It tells all."""\n'
            '    logger.info("told %s", x)\n'
            '    logger.warning("nobody")\n'
            '    warnings.warn(f"beside {x}")\n'
            '    typer.Option(help="stands")\n'
            '    raise ValueError(f"{x} is no tensor")\n'
        )
        assert sorted(words_of_source(plain_words, tmp_path, code)) == [
            ("docstrings", 1, "gives"),
            ("docstrings", 3, "tells"),
            ("errors", 8, "is no"),
            ("help", 7, "stands"),
            ("logs", 4, "told"),
            ("warnings", 5, "nobody"),
            ("warnings", 6, "beside"),
        ]

    def test_other_strings_and_comments_do_not_count(self, plain_words: ModuleType, tmp_path: Path) -> None:
        code = 'gives = "nobody"  # told\nraise KeyError(name)\nprint("beside")\n'
        assert words_of_source(plain_words, tmp_path, code) == []


class TestCheck:
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        (tmp_path / "docs").mkdir()
        (tmp_path / "sparsebit").mkdir()
        (tmp_path / "docs" / "page.md").write_text("plain " * 999 + "beside", encoding="utf-8")
        (tmp_path / "README.md").write_text("plain", encoding="utf-8")
        return tmp_path

    def test_above_the_limit(self, plain_words: ModuleType, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert plain_words.main(["--root", str(root), "--list", "--check", "docs"]) == 1
        out, err = capsys.readouterr()
        assert "docs: docs/page.md:1: beside" in out
        assert "docs            1,000         1        10.0" in out
        assert "more than 5 mannered words per 10,000 in docs" in err

    def test_only_named_kinds_fail(self, plain_words: ModuleType, root: Path) -> None:
        assert plain_words.main(["--root", str(root), "--check", "readme"]) == 0
        assert plain_words.main(["--root", str(root)]) == 0
