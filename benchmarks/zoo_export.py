"""Every architecture of `zoo.py`, quantized for ONNX Runtime: exported, loaded, run, compared with its simulation.

    python benchmarks/zoo_export.py [--only GLOB] [--json FILE]

Prints one JSON line per architecture: whether torch exports the float model, whether the quantized one exports, loads
in ONNX Runtime and passes the parity gate, the gate's figures, the time of the export and the sizes of both files.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from zoo import spread
from zoo_models import ZOO
from zoo_runner import run_zoo

BACKEND = "onnxruntime"


def examine(name: str) -> dict[str, Any]:
    """One architecture's record; a failure is a result here."""
    record: dict[str, Any] = {"model": name, "backend": BACKEND, "float_exports": True, "ok": False}
    try:
        with tempfile.TemporaryDirectory() as folder:
            record |= _export(name, Path(folder), record)
    except Exception as error:
        record["error"] = "".join(traceback.format_exception_only(error)).strip()[:600]
        record["refused"] = type(error).__module__ == "sparsebit.errors"  # with a reason, not by a fault
    return record


def _export(name: str, folder: Path, record: dict[str, Any]) -> dict[str, Any]:
    import sparsebit
    from sparsebit import PROFILES

    torch.manual_seed(0)
    model, batch = ZOO[name]()
    model.eval()
    spread(model)
    try:
        record["float_bytes"] = _export_float(model, batch, folder / "float.onnx")
    except Exception as error:
        record |= {"float_exports": False, "float_error": str(error).strip().splitlines()[-1][:300]}
    config = {**PROFILES[BACKEND].recommended(), "DEVICE": "cpu"}
    qmodel = sparsebit.quantize(model, [batch], config)
    start = time.perf_counter()
    parity = qmodel.export_onnx(batch, folder / "int8.onnx", check=[batch])
    assert parity is not None
    worst = parity.worst
    return {
        "ok": True,
        "seconds": round(time.perf_counter() - start, 1),
        "bytes": (folder / "int8.onnx").stat().st_size,
        "exact": parity.is_exact,
        "max_difference": worst.max_difference,
        "sqnr_db": worst.sqnr_db if worst.max_difference else None,
        "noise_db": worst.noise_db,
        "top1": worst.top1,
    }


def _export_float(model: torch.nn.Module, batch: Any, file: Path) -> int:
    args, kwargs = ((), dict(batch)) if isinstance(batch, dict) else ((batch,), {})
    with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        torch.onnx.export(model, args, str(file), kwargs=kwargs, dynamo=True, external_data=False, verbose=False)
    return file.stat().st_size


if __name__ == "__main__":
    run_zoo("zoo_export", examine, __doc__)
