"""`InputRounding`: the inputs of a layer rounded to 8 bits, as the activation scheme of a folder says.

The values are those of compressed-tensors: a number is `(code - zero) * scale`. int8 has codes from -128 to 127; with
a scale for each token it is the largest number divided by 127.5, or the range divided by 255 with a zero point. fp8 has
float8_e4m3fn numbers, at most 448. Backward is straight through.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparsebit.numerics.spec import LARGEST_FLOAT8

InputKind = Literal["int8", "fp8"]


@dataclass(frozen=True)
class InputFormat:
    """How a layer's inputs are rounded. `dynamic`: with a scale for each token, else with one scale for all."""

    kind: InputKind
    dynamic: bool
    symmetric: bool = True


@dataclass(frozen=True)
class InputRounding:
    """A forward pre-hook that rounds the first argument. `scale`, `zero`: of a format that is not dynamic."""

    format: InputFormat
    scale: float = 1.0
    zero: float = 0.0

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x: Tensor = args[0]
        rounded = self.rounded(x.detach().float()).to(x.dtype)
        needs_gradient = x.requires_grad and torch.is_grad_enabled()
        return (x + (rounded - x).detach() if needs_gradient else rounded, *args[1:])

    def rounded(self, x: Tensor) -> Tensor:
        """The rounded numbers of `x (..., features)`."""
        scale, zero = self._per_token(x) if self.format.dynamic else (x.new_tensor(self.scale), x.new_tensor(self.zero))
        if self.format.kind == "fp8":
            return (x / scale).clamp_(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(torch.float8_e4m3fn).float().mul_(scale)
        return (x / scale).add_(zero).round_().clamp_(-128, 127).sub_(zero).mul_(scale)

    def _per_token(self, x: Tensor) -> tuple[Tensor, Tensor]:
        low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
        if self.format.symmetric:
            half = LARGEST_FLOAT8 if self.format.kind == "fp8" else 127.5
            scale = torch.maximum(-low, high) / half
            zero = torch.zeros_like(scale)
        else:
            scale = (high - low) / 255
            zero = (-128 - low / torch.where(scale == 0, 1.0, scale)).clamp(-128, 127).round()
        return torch.where(scale == 0, torch.finfo(x.dtype).eps, scale), zero
