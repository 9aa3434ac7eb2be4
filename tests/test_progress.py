from __future__ import annotations

import contextlib
import io
import time
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


class Clock:
    """Time passes when the work says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress, "_clock", made)
    monkeypatch.delenv("RANK", raising=False)
    return made


def test_the_items_come_through(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress.track(range(20), "layers")) == list(range(20))
    assert capsys.readouterr() == ("", "")  # short work: no line


def test_a_file_gets_a_line_for_each_long_item(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    for number in progress.track(range(3), "quantizing blocks"):
        clock.now += 90
        progress.note(f"loss {number}")
    assert capsys.readouterr().err.splitlines() == [
        "quantizing blocks: 1 of 3 done in 2 min, about 3 min left; loss 0",
        "quantizing blocks: 2 of 3 done in 3 min, about 2 min left; loss 1",
        "quantizing blocks: 3 of 3 done in 4 min; loss 2",
    ]


def test_short_items_share_a_line(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in progress.track(iter(range(100)), "batches"):
        clock.now += 0.25
    assert capsys.readouterr().err.splitlines() == ["batches: 40 done in 10 s", "batches: 80 done in 20 s"]


def test_a_total_from_elsewhere_gives_the_time_left(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in progress.track(iter(range(4)), "batches", total=4):
        clock.now += 60
    assert capsys.readouterr().err.splitlines()[0] == "batches: 1 of 4 done in 1 min, about 3 min left"


def test_the_time_left_follows_recent_items(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """Blocks that an interrupted run had finished take no time."""
    for number in progress.track(range(60), "blocks"):
        clock.now += 60 if number >= 30 else 0.0
    assert "blocks: 50 of 60 done in 20 min, about 10 min left" in capsys.readouterr().err


def test_inner_work_is_in_the_line_of_the_heartbeat(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress.heartbeat():
        clock.now += 59
        progress._lines.beat()
        assert capsys.readouterr().err == ""
        clock.now += 2
        progress._lines.beat()
        assert capsys.readouterr().err == "at work for 1 min\n"
        for _ in progress.track(range(4), "blocks"):
            for _ in progress.track(range(10), "windows"):
                clock.now += 11
                progress._lines.beat()
            break
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["blocks: 0 of 4 done in 1 min (windows: 5 of 10 done in 1 min, about 44 s left)"]


def test_the_heartbeat_needs_no_items(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress.heartbeat():
        clock.now += 3600
        for _ in range(100):
            if (said := capsys.readouterr().err) != "":
                break
            time.sleep(0.1)
    assert said == "at work for 1 h\n"


def test_a_phase_is_named(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    @progress.phase("checking the file")
    def check() -> None:
        clock.now += 100
        progress._lines.beat()

    with progress.heartbeat():
        check()
    assert capsys.readouterr().err == "checking the file: 2 min\n"


def test_phases_that_follow_each_other_are_not_silent(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress.heartbeat():
        for phase in range(30):
            for _ in progress.track(range(2), f"phase {phase}"):
                clock.now += 4
                progress._lines.beat()
    assert len(capsys.readouterr().err.splitlines()) == 4  # in 4 minutes


@pytest.mark.parametrize("reason", ["quiet", "rank"])
def test_no_lines(
    reason: str, clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if reason == "quiet":
        monkeypatch.setattr(progress, "_quiet", True)
    else:
        monkeypatch.setenv("RANK", "1")
    with progress.heartbeat():
        for _ in progress.track(range(3), "blocks"):
            clock.now += 100
            progress.note("loss")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (61, "1 min"), (3600, "1 h"), (7500, "2 h 5 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert progress.duration(seconds) == text


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
