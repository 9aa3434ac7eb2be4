"""numpy, onnx and onnx_ir, each imported at its first use: all are optional, and `import sparsebit` loads none."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sparsebit.errors import MissingExtraError

__all__ = ["ir", "numpy", "onnx"]

if TYPE_CHECKING:
    import numpy
    import onnx
    import onnx_ir as ir
else:

    class _Package:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            if attribute.startswith("__"):  # asked by tools that inspect this module
                raise AttributeError(attribute)
            try:
                package = importlib.import_module(self._name)
            except Exception:  # a broken package raises anything
                raise MissingExtraError(self._name.replace("_", "-"), "onnx", "working with ONNX files") from None
            return getattr(package, attribute)

    numpy, onnx, ir = _Package("numpy"), _Package("onnx"), _Package("onnx_ir")
