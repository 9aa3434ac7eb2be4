from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator

import pytest

from sparsebit import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def terminal() -> Iterator[Terminal]:
    """No fixture: between a fixture and its test pytest puts stderr back."""
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.redirect_stderr(Terminal()) as fake:
        monkeypatch.setenv("TERM", "xterm")  # on a dumb terminal rich draws nothing
        yield fake


def test_the_items_come_through(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress.track(range(20), "layers")) == list(range(20))
    assert capsys.readouterr() == ("", "")  # no terminal, no bar


def test_a_terminal_sees_a_bar() -> None:
    with terminal() as screen:
        assert list(progress.track(range(20), "layers")) == list(range(20))
    assert "layers" in screen.getvalue()


def test_few_items_need_none() -> None:
    with terminal() as screen:
        assert list(progress.track([1, 2, 3], "layers")) == [1, 2, 3]
    assert screen.getvalue() == ""


def test_items_of_unknown_number() -> None:
    with terminal() as screen:
        assert list(progress.track(iter("abc"), "batches")) == ["a", "b", "c"]
    assert "batches" in screen.getvalue()


def test_quiet() -> None:
    progress.set_quiet(True)
    try:
        with terminal() as screen:
            assert list(progress.track(range(20), "layers")) == list(range(20))
    finally:
        progress.set_quiet(False)
    assert screen.getvalue() == ""
