"""A quantized model as a page, and as the last line of a notebook's cell."""

from __future__ import annotations

import os
from pathlib import Path

from sparsebit.quantization.faithful.simulation import SimulatedModel
from sparsebit.quantization.recording import Result, record
from sparsebit.records import RunRecord
from sparsebit.report import write_page
from sparsebit.report.notebook import fragment
from sparsebit.report.read_record import run_of_record


def report(
    qmodel: SimulatedModel, file: str | os.PathLike[str], *results: Result | None, title: str | None = None
) -> Path:
    """Write one HTML file about the model: formats, bytes, what is float and why, and what the given results add.

    `results`: as for `sparsebit.record`: what `profile`, `export_onnx(..., check=...)` and `sparsebit.audit` returned.
    """
    made = record(qmodel, *results)
    name = type(qmodel.original).__name__
    return write_page(file, [run_of_record(made, name)], title)


def in_notebook(qmodel: SimulatedModel) -> str:
    """The numbers at the top of the page, for `_repr_html_`."""
    kind = f"quantized for {qmodel.config.BACKEND}"
    run = run_of_record(RunRecord(coverage=qmodel.coverage), type(qmodel.original).__name__)
    return fragment(run.replace(kind=kind))
