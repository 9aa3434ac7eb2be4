"""Lets torchvision be imported where its compiled part does not fit the installed torch (a CPU-only torch, say).

torchvision describes `nms` and `qnms` to torch while it is imported, and fails when its library did not define them.
Its model definitions need neither, so the tests declare the two operators; calling one stays an error.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

_OPERATORS = ("nms", "qnms")
_library: torch.library.Library | None = None  # a definition lives as long as its Library object


def install() -> None:
    """Declare what `import torchvision` needs, unless torchvision is absent or whole."""
    global _library
    spec = importlib.util.find_spec("torchvision")
    if _library is not None or spec is None or spec.origin is None or _loads(Path(spec.origin).parent):
        return
    _library = torch.library.Library("torchvision", "DEF")
    for name in _OPERATORS:
        _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _loads(package: Path) -> bool:
    for file in package.glob("_C*"):
        try:
            torch.ops.load_library(str(file))
        except OSError:
            continue
        return True
    return False
