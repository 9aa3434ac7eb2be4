"""What the examples share: their options, and the table at the end."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from sparsebit.quantization import QuantModel

CONFIGS = Path(__file__).resolve().parent / "configs"
DATA = Path(os.environ.get("SPARSEBIT_DATA", CONFIGS.parents[2] / "shared" / "data"))

Scores = Mapping[str, tuple[float | None, float]]
"""Metric -> (of the float model, of the quantized one); None where float has no score of its own."""


def arguments(description: str | None, limit: str, config: str) -> argparse.ArgumentParser:
    """A parser with the options that every example takes; `limit`: what `--limit` counts."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=config, help="what to quantize, and how (%(default)s)")
    parser.add_argument("--data", type=Path, default=DATA, help="the data folder: SPARSEBIT_DATA, or %(default)s")
    parser.add_argument(
        "--limit", type=int, metavar="N", help=f"a quick look: calibrate and score on at most N {limit}"
    )
    parser.add_argument("--save", type=Path, metavar="DIR", help="keep the quantized model there")
    return parser


def existing(path: Path) -> Path:
    if not path.exists():
        sys.exit(f"{path} does not exist; name the data folder with --data or SPARSEBIT_DATA")
    return path


def sqnr_db(quantized: torch.Tensor, original: torch.Tensor) -> float:
    """10·log10 of signal over error energy: one more bit is six more decibels."""
    error = (quantized - original).double().square().sum().clamp_min(1e-30)
    return float(10 * torch.log10(original.double().square().sum() / error))


def finish(qmodel: QuantModel, batch: Any, scores: Scores, save: Path | None = None) -> None:
    """Print the scores, what is quantized, and the three layers that lose most on `batch`; save if asked to."""
    table = Table("metric", "float", "quantized", "loss", title=f"{qmodel.config.BACKEND} on {qmodel.config.DEVICE}")
    for metric, (original, quantized) in scores.items():
        before, loss = ("", "") if original is None else (f"{original:.4g}", f"{original - quantized:.4g}")
        table.add_row(metric, before, f"{quantized:.4g}", loss)
    errors = qmodel.get_quantization_error(batch, checker=sqnr_db)
    worst = sorted(errors.items(), key=lambda item: item[1])[:3]
    console = Console()
    console.print(table)
    console.print("coverage:", str(qmodel.coverage).splitlines()[0])
    console.print("worst layers:", ", ".join(f"{layer} ({decibels:.1f} dB)" for layer, decibels in worst))
    if save is not None:
        console.print("saved:", qmodel.save(save))
