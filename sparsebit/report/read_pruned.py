"""The folder of a pruned model as a run of the page: what each layer has left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparsebit.report.page_data import Run

CHANNELS = "channels.json"


def run_of_pruned(folder: Path, description: dict[str, Any]) -> Run:
    """The run of a folder that `SparseModel.save` wrote."""
    return Run(name=folder.resolve().name, kind=f"pruned {description.get('class', 'model')}")
