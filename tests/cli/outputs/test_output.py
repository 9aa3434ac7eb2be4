"""Results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import logging
import math
import warnings

import pytest

from sparsebit import progress
from sparsebit.cli.outputs.output import decibel, facts_table, kilobytes, plain, speaking


def test_warnings_of_the_library_are_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    with speaking(as_json=True, quiet=True) as out:
        for _ in range(2):
            logging.getLogger("sparsebit.quantization.post_training").warning("calibrated on %d samples", 3)
            logging.getLogger("sparsebit.quantization.post_training").info("details")
    assert out.warnings == ["calibrated on 3 samples"]
    assert capsys.readouterr().err == "warning: calibrated on 3 samples\n"
    assert logging.getLogger("sparsebit").handlers == []


def test_people_see_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with speaking(as_json=False, quiet=False) as out:
        out.remark("on the way")
        out.result({"key": 1}, "[shown]")
    said = capsys.readouterr()
    assert said.out == "[shown]\n" and said.err == "on the way\n"


def test_programs_get_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    with speaking(as_json=True, quiet=False) as out:
        print("from the user's model")  # noqa: T201
        warnings.warn("a wish cost something", stacklevel=1)
        out.result({"key": math.inf}, "shown")
    said = capsys.readouterr()
    assert json.loads(said.out) == {"key": None, "warnings": ["a wish cost something"]}
    assert said.err == "from the user's model\nwarning: a wish cost something\n"


def test_a_warning_is_told_once_and_also_when_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with speaking(as_json=False, quiet=True) as out:
        for _ in range(2):
            warnings.warn("careful", stacklevel=1)
        out.remark("on the way")
    assert capsys.readouterr().err == "warning: careful\n"


def test_quiet_ends_with_the_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(progress, "set_quiet", calls.append)
    with pytest.raises(RuntimeError), speaking(as_json=False, quiet=True):
        raise RuntimeError
    assert calls == [True, False]


def test_plain() -> None:
    assert plain({1: (math.nan, [-math.inf, 2.5, "x", None, True])}) == {"1": [None, [None, 2.5, "x", None, True]]}


def test_facts_without_words_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    with speaking(as_json=False, quiet=True) as out:
        out.result({}, facts_table({"file": "[x].onnx", "time": "", "size": "1 KB"}))
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["file", "[x].onnx"],
        ["size", "1", "KB"],
    ]


def test_figures() -> None:
    assert [decibel(value) for value in (34.21, math.inf, -math.inf)] == ["34.2 dB", "exact", "no signal"]
    assert [kilobytes(value) for value in (80, 55_904, 44_600_000)] == ["0.1 KB", "55.9 KB", "44.6 MB"]
