"""A small record, and its parts."""

from __future__ import annotations

import math
from typing import Any

from sparsebit.records import (
    Audit,
    Calibration,
    Coverage,
    Environment,
    ErrorProfile,
    FileFacts,
    LayerError,
    ModelFacts,
    OutputError,
    OutputParity,
    Parity,
    ParityCheck,
    QuantizedLayer,
    Run,
    RunRecord,
    SiteError,
    ValueHistogram,
)

ENVIRONMENT = Environment("0.1.0", "3.11.4", "2.13.0", {"onnxruntime": "1.26"}, "Linux", "a CPU", 2)
MODEL = ModelFacts("net", "Net", 10, "architecture", "numbers")
FILE = FileFacts("net.onnx", "ab12", 100, 400)
HISTOGRAM = ValueHistogram(-0.5, 0.25, (1, 2, 3))


def run(verb: str = "quantize", **values: Any) -> Run:
    return Run(verb, "2026-11-16T12:00:00+00:00", 2.0, {"calibration": 1.5}, ("model",), ENVIRONMENT, **values)


def profile(sync: bool = False, sqnr_db: float = 30.0) -> ErrorProfile:
    site = SiteError("fc.input", "activation", "uint8", 1, 0.01, 40.0, -0.4, 0.3, -0.5, 0.5, 0.0, HISTOGRAM)
    return ErrorProfile(sync, 2, (LayerError("fc", 0.1, sqnr_db),), (site,))


def parity(against: str = "the simulation", runtime: str = "onnxruntime") -> ParityCheck:
    outputs = (OutputParity("y", 0.0, 0.0, math.inf, None, 30.0, 64),)
    return ParityCheck(Parity("net.onnx", runtime, against, outputs), data="64 images")


def audit(runtime: str = "onnxruntime", num_threads: int = 1) -> Audit:
    return Audit("net.onnx", runtime, "1.26", "a CPU", num_threads, (), {}, 100, verdict="fast")


RECORD = RunRecord(
    model=MODEL,
    config={"BACKEND": "onnxruntime", "W": {"QUANTIZER": {"BIT": 8}}},
    coverage=Coverage((QuantizedLayer("fc", "QLinear", {"input": "uint8"}),)),
    calibration=Calibration(32, data="32 images"),
    output=OutputError(math.inf, 32),
    errors=(profile(),),
    file=FILE,
    parity=(parity(),),
    audits=(audit(),),
    runs=(run(made=("model", "file")),),
)
