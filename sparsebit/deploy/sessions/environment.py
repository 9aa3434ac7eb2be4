"""`environment`: versions and machine, for a record."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata

from sparsebit.deploy.sessions.cpu import cpu_name
from sparsebit.records import Environment
from sparsebit.version import __version__

_PACKAGES = ("onnx", "onnxruntime", "openvino", "onnxscript", "torchvision", "timm", "transformers", "triton")


def environment() -> Environment:
    """The versions and the machine of this process. A GPU is named if torch has used one."""
    torch = sys.modules.get("torch")
    uses_gpu = torch is not None and torch.cuda.is_initialized()
    return Environment(
        sparsebit=__version__,
        python=platform.python_version(),
        torch=_version("torch") or "",
        packages={name: version for name in _PACKAGES if (version := _version(name))},
        system=platform.platform(),
        cpu=cpu_name(),
        num_cpus=os.cpu_count() or 1,
        gpu=torch.cuda.get_device_name() if torch is not None and uses_gpu else None,
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
