"""Sparsebit makes PyTorch models small and fast.

>>> import torch, sparsebit
>>> model, batches = torch.nn.Linear(4, 2), [torch.randn(8, 4)]
>>> qmodel = sparsebit.quantize(model, batches, "onnxruntime")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparsebit.version import __version__

if TYPE_CHECKING:
    from sparsebit.quantization.one_call import quantize
    from sparsebit.quantization.recording import record

__all__ = ["__version__", "quantize", "record"]


def __getattr__(name: str) -> Any:
    # Loaded at first use: `import sparsebit` alone stays instant.
    if name == "quantize":
        from sparsebit.quantization.one_call import quantize

        return quantize
    if name == "record":
        from sparsebit.quantization.recording import record

        return record
    raise AttributeError(f"module 'sparsebit' has no attribute {name!r}")
