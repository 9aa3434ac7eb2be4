"""Sparsebit makes PyTorch models small and fast.

>>> import torch, sparsebit
>>> model, batches = torch.nn.Linear(4, 2), [torch.randn(8, 4)]
>>> qmodel = sparsebit.quantize(model, batches, "onnxruntime")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sparsebit.errors import (
    BackendError,
    CalibrationError,
    CaptureError,
    CheckpointError,
    ConfigError,
    DeploymentError,
    MissingExtraError,
    RecordError,
    SparsebitError,
    SpecError,
)
from sparsebit.first_sparsebit import add_former_modules
from sparsebit.version import __version__, warn_of_the_index_package

if TYPE_CHECKING:
    from sparsebit.compress.compress import compress
    from sparsebit.deploy.audit.audit_file import audit
    from sparsebit.deploy.audit.tensorrt_rules import tensorrt_violations
    from sparsebit.deploy.loading.load_onnx import load_onnx
    from sparsebit.deploy.runtimes import PROFILES, RuntimeProfile
    from sparsebit.deploy.sessions.runtime_sessions import open_session
    from sparsebit.quantization.post_training import quantize
    from sparsebit.quantization.recording import record
    from sparsebit.records import (
        AccuracyGains,
        Audit,
        Coverage,
        ErrorProfile,
        GradientCheck,
        Parity,
        RunRecord,
        Tolerance,
        extend_record,
        measured,
        read_record,
        write_record,
    )

__all__ = [
    "PROFILES",
    "AccuracyGains",
    "Audit",
    "BackendError",
    "CalibrationError",
    "CaptureError",
    "CheckpointError",
    "ConfigError",
    "Coverage",
    "DeploymentError",
    "ErrorProfile",
    "GradientCheck",
    "MissingExtraError",
    "Parity",
    "RecordError",
    "RunRecord",
    "RuntimeProfile",
    "SparsebitError",
    "SpecError",
    "Tolerance",
    "__version__",
    "audit",
    "compress",
    "extend_record",
    "load_onnx",
    "measured",
    "open_session",
    "quantize",
    "read_record",
    "record",
    "tensorrt_violations",
    "write_record",
]

warn_of_the_index_package()
add_former_modules("sparsebit.utils")

# Modules that are loaded at the first use of one of these names: `import sparsebit` alone stays fast.
_LAZY = {
    "PROFILES": "sparsebit.deploy.runtimes",
    "RuntimeProfile": "sparsebit.deploy.runtimes",
    "audit": "sparsebit.deploy.audit.audit_file",
    "load_onnx": "sparsebit.deploy.loading.load_onnx",
    "open_session": "sparsebit.deploy.sessions.runtime_sessions",
    "quantize": "sparsebit.quantization.post_training",
    "record": "sparsebit.quantization.recording",
    "tensorrt_violations": "sparsebit.deploy.audit.tensorrt_rules",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'sparsebit' has no attribute {name!r}")
    if name == "compress":  # a package that can be called
        return importlib.import_module("sparsebit.compress")
    return getattr(importlib.import_module(_LAZY.get(name, "sparsebit.records")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
