"""The folder of a quantized language model as a run of the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparsebit.report.page_data import Run

CONFIG = "config.json"


def is_packed(config: dict[str, Any]) -> bool:
    """Whether the model's config says how its weights are quantized."""
    return isinstance(config.get("quantization_config"), dict)


def run_of_language_model(folder: Path, config: dict[str, Any]) -> Run:
    """The run of a folder that `sparsebit llm quantize` wrote."""
    return Run(name=folder.resolve().name, kind="quantized language model")
