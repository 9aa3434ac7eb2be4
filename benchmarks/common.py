"""What every benchmark needs: the data folder, the hardware line, JSON lines."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


def data_folder() -> Path:
    """Where the optional weights and data sets are: SPARSEBIT_DATA, or `../shared/data` beside the checkout."""
    folder = Path(os.environ.get("SPARSEBIT_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        sys.exit(f"{folder} does not exist; set SPARSEBIT_DATA to the folder with the benchmark data")
    return folder


def hardware() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text().splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name")), cpu)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": cpu,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "gpu": gpu,
        "torch": str(torch.__version__),
    }


def emit(record: dict[str, Any], file: Path | None = None) -> None:
    """One JSON line to stdout, and to `file` where one is given."""
    line = json.dumps({"date": time.strftime("%Y-%m-%d"), **record, "hardware": hardware()})
    print(line, flush=True)
    if file is not None:
        with file.open("a") as handle:
            handle.write(line + "\n")


def sqnr_db(original: torch.Tensor, quantized: torch.Tensor) -> float:
    """10·log10 of signal over error energy."""
    error = (original - quantized).double().pow(2).sum()
    return float(10 * torch.log10(original.double().pow(2).sum() / error.clamp_min(1e-30)))
