"""Writes runs as one page."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from sparsebit.errors import RecordError
from sparsebit.folders import replace_text, unwritable
from sparsebit.report.html import page_html
from sparsebit.report.page_data import Page, Run
from sparsebit.version import __version__


def page_of(runs: Sequence[Run], title: str | None = None) -> Page:
    """The page of one run, or of several to compare; equal names get a number."""
    counts = Counter(run.name for run in runs)
    named = [
        run.replace(name=f"{run.name} ({place})") if counts[run.name] > 1 else run for place, run in enumerate(runs, 1)
    ]
    return Page(title or " and ".join(run.name for run in named), __version__, tuple(named))


def write_page(file: str | os.PathLike[str], runs: Sequence[Run], title: str | None = None) -> Path:
    """Write the page, whole or not at all; returns its path."""
    target = checked_page_path(file)
    replace_text(target, page_html(page_of(runs, title)))
    return target


def checked_page_path(file: str | os.PathLike[str]) -> Path:
    """The path, if a page can be written there; for use before any work is done."""
    target = Path(file).expanduser()
    if fault := unwritable(target, "report.html"):
        raise RecordError(fault)
    return target
