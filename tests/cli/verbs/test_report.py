"""`sparsebit report`: a page or a text from records, and what is said when something is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsebit.records import write_record
from tests.cli.conftest import Sparsebit
from tests.report.made_runs import LADDER, RECORD


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    write_record(tmp_path / "run" / "record.json", RECORD)
    (tmp_path / "run" / "ladder.json").write_text(LADDER.to_json())
    return Path("run")


def test_a_page(sparsebit: Sparsebit, run: Path) -> None:
    answer = sparsebit("report", run)
    assert answer.code == 0, answer.err
    assert answer.out.startswith("report.html, ") and "<title>run</title>" in Path("report.html").read_text()


def test_two_runs_with_a_title(sparsebit: Sparsebit, run: Path) -> None:
    answer = sparsebit("report", run, run / "record.json", "--title", "Both", "-o", "both.html", "--json")
    assert [one["name"] for one in answer.json["runs"]] == ["run", "record"] and answer.json["file"] == "both.html"
    assert "<title>Both</title>" in Path("both.html").read_text()


def test_text_writes_no_page(sparsebit: Sparsebit, run: Path) -> None:
    answer = sparsebit("report", run, "--text")
    assert answer.code == 0 and "goal met" in answer.out and not Path("report.html").exists()
    assert sparsebit("report", run, "--text", "--title", "x").code == 2


def test_errors_name_what_is_allowed(sparsebit: Sparsebit, run: Path) -> None:
    (run / "ladder.json").write_text('{"format": "sparsebit-ladder",')
    answer = sparsebit("report", run)
    assert answer.code == 1 and "ladder.json is damaged" in answer.err
    answer = sparsebit("report", "nowhere")
    assert answer.code == 1 and "give the folder of `sparsebit compress`, a record" in answer.err
    assert sparsebit("report").code == 2
