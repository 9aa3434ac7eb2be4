"""What stands in front of a quantizer may leave its work to it: an activation function, or what takes a tensor apart.

It then gives on what it was given, and tells the quantizer.
"""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sparsebit.numerics.gradients import Gradient

NOTHING = "nothing"  # is left to do: the values are quantized already


class TakesOver(nn.Module):
    """The quantizer's side."""

    GRADIENT: ClassVar[Gradient]
    handed: tuple[str, weakref.ref[Tensor]] | None = None

    def hand_over(self, what: str, x: Tensor) -> None:
        """The next forward of `x` is to do `what` besides: an activation function ("relu" too), or `NOTHING` at all.

        It holds for the very tensor: where another one arrives, an exception or another way through the model was
        between.
        """
        self.__dict__["handed"] = (what, weakref.ref(x))  # at every forward: without what `nn.Module` does for it

    def take_over(self, x: Tensor) -> tuple[Gradient, str]:
        """The gradient of a forward of `x`, and what it begins with; a ReLU is in the gradient alone."""
        handed = self.handed
        if handed is None or torch.compiler.is_compiling():
            return self.GRADIENT, ""
        self.__dict__["handed"] = None
        what, tensor = handed
        if tensor() is not x:
            return self.GRADIENT, ""
        if what == "relu":
            return "relu_lsq" if self.GRADIENT == "lsq" else "relu_ste", ""
        return self.GRADIENT, what

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"handed": None}
