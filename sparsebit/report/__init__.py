"""One page for a result: `read_run` reads what a run left on disk, `write_page` writes the page."""

from __future__ import annotations

from sparsebit.report.reading import read_run
from sparsebit.report.writing import page_of, write_page

__all__ = ["page_of", "read_run", "write_page"]
