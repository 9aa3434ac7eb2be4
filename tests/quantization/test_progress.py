from __future__ import annotations

import io
import sys

import pytest

from sparsebit.quantization import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    fake = Terminal()
    monkeypatch.setattr(sys, "stderr", fake)
    monkeypatch.setenv("TERM", "xterm")  # on a dumb terminal rich draws nothing
    return fake


def test_the_items_come_through(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress.track(range(20), "layers")) == list(range(20))
    assert capsys.readouterr() == ("", "")  # no terminal, no bar


def test_a_terminal_sees_a_bar(terminal: Terminal) -> None:
    assert list(progress.track(range(20), "layers")) == list(range(20))
    assert "layers" in terminal.getvalue()


def test_few_items_need_none(terminal: Terminal) -> None:
    assert list(progress.track([1, 2, 3], "layers")) == [1, 2, 3]
    assert terminal.getvalue() == ""


def test_items_of_unknown_number(terminal: Terminal) -> None:
    assert list(progress.track(iter("abc"), "batches")) == ["a", "b", "c"]
    assert "batches" in terminal.getvalue()


def test_quiet(terminal: Terminal) -> None:
    progress.set_quiet(True)
    try:
        assert list(progress.track(range(20), "layers")) == list(range(20))
    finally:
        progress.set_quiet(False)
    assert terminal.getvalue() == ""
