from __future__ import annotations

from pathlib import Path

import pytest

from sparsebit.errors import MissingExtraError


def error_of(module: str) -> str:
    try:
        __import__(module)
    except ImportError:
        return str(MissingExtraError("a-package", "extra", "this"))
    raise AssertionError("it was imported")


def test_a_package_that_is_not_there() -> None:
    assert error_of("no_such_package_anywhere") == (
        "this needs the package 'a-package', which is not installed: pip install 'sparsebit[extra]'"
    )


def test_a_package_that_fails_while_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_package.py").write_text("raise ImportError('needs libfoo 3\\nand more')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    told = error_of("broken_package")
    assert "which cannot be imported (needs libfoo 3):" in told and "not installed" not in told
