"""`sparsebit report`: the page of one run, or of several side by side."""

from __future__ import annotations

from pathlib import Path

from sparsebit.cli.options import refuse
from sparsebit.cli.outputs.output import Output, kilobytes
from sparsebit.cli.outputs.recording import Recording
from sparsebit.cli.verb_options import ReportOptions
from sparsebit.report.page_data import plain
from sparsebit.report.reading import read_run
from sparsebit.report.text import text_of
from sparsebit.report.writing import page_of, write_page


def report(asked: ReportOptions, out: Output, recorded: Recording) -> None:
    """Read the runs, and write the page or print a summary."""
    del recorded
    refuse({"a text has no title; leave --title out, or --text": asked.text and asked.title is not None}, "--title")
    runs = [read_run(path) for path in asked.runs]
    file = asked.output or (None if asked.text or asked.said.json else Path("report.html"))
    if file is not None:
        write_page(file, runs, asked.title)
    record = {"file": file and str(file), **plain(page_of(runs, asked.title))}
    written = [] if file is None else [f"{file}, {kilobytes(file.stat().st_size)}: open it in a browser"]
    out.result(record, *([text_of(runs)] if asked.text else []), *written)
