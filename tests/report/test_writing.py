from __future__ import annotations

from pathlib import Path

import pytest

from sparsebit.errors import RecordError
from sparsebit.report import page_of, write_page
from sparsebit.report.page_data import Run

RUN = Run("net", "model")


def test_the_title_is_of_the_runs_and_names_differ() -> None:
    assert page_of([RUN]).title == "net" and page_of([RUN], "mine").title == "mine"
    page = page_of([RUN, Run("other", "model"), RUN])
    assert [run.name for run in page.runs] == ["net (1)", "other", "net (3)"]


def test_an_older_page_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text("old")
    assert write_page(file, [RUN]) == file and file.read_text().startswith("<!DOCTYPE html>")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="does not exist; create it first"):
        write_page(tmp_path / "missing" / "page.html", [RUN])
    with pytest.raises(RecordError, match="is a folder; name a file in it"):
        write_page(tmp_path, [RUN])
