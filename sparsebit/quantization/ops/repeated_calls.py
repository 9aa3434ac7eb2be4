"""The integer arithmetic of a layer that the model calls on several tensors, each with a grid of its own.

The int32 bias and the kernel's steps depend on the input's scale, so each grid needs its own. The `QIdentity` or
`QShared` before the layer stores its quantizer's name on its output tensor, and the layer chooses by that name. The
name is on the tensor rather than in the layer, so that several threads can run one model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.quantization.ops.bias import BiasRounding
from sparsebit.quantization.ops.integer_ops import IntegerLayer
from sparsebit.quantization.quantizers.base import Quantizer

_GRID = "_sparsebit_grid"  # an attribute of a tensor: the name of the quantizer that it comes from


class CallArithmetic(nn.Module):
    """The arithmetic for one input's grid: the int32 bias, and the kernel's steps."""

    def __init__(self, source: Quantizer, bias_rounding: BiasRounding | None, integer: IntegerLayer | None) -> None:
        super().__init__()
        self.source = source.name
        self.bias_rounding = bias_rounding
        self.integer = integer


class CallArithmetics(nn.ModuleList):
    """One `CallArithmetic` per input's grid."""

    def choose(self, x: Any) -> tuple[BiasRounding | None, IntegerLayer | None]:
        """Those for a call with this input; none if its grid is unknown."""
        name = None if torch.compiler.is_dynamo_compiling() else getattr(x, _GRID, None)
        call: Any
        for call in self if name is not None else ():
            if call.source == name:
                return call.bias_rounding, call.integer
        return None, None


def note_grid(x: Any, quantizer: Quantizer) -> None:
    """Store on `x` which quantizer it comes from. By name: a tensor that is saved or copied keeps its attributes."""
    if isinstance(x, Tensor) and quantizer.is_enable and not torch.compiler.is_dynamo_compiling():
        setattr(x, _GRID, quantizer.name)
