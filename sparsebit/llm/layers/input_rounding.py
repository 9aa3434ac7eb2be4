"""`InputRounding`: the inputs of a layer rounded to 8 or 4 bits, as the activation scheme of a folder says.

The values are those of compressed-tensors, computed in float32:

| kind | a number is | scale |
|---|---|---|
| int8 | `(code - zero) * scale`, codes of 8 bits | a token: largest / 127.5 (with zero points range / 255); constant |
| fp8 | `float8_e4m3fn * scale` | a token: largest / 448; or constant |
| nvfp4 | `E2M1 * scale / divisor` | 16 columns: float8_e4m3fn of `divisor * largest / 6`; the divisor is constant |
| mxfp4 | `E2M1 * scale` | 32 columns: the power of two below largest / 4, or the next one from 1.75 times it on |

vLLM divides the largest number of a token by 127 for int8, so codes may differ by one there. Backward is straight
through.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsebit.kernels import eight_bits
from sparsebit.llm.layers.float_kinds import GROUPS
from sparsebit.llm.layers.input_kinds import InputFormat
from sparsebit.numerics.float4 import LARGEST_FLOAT4, float4_codes, float4_values
from sparsebit.numerics.spec import LARGEST_FLOAT8

_SMALLEST_FLOAT8_SCALE = 0.125  # instead of a scale of 0, as compressed-tensors takes it


@dataclass(frozen=True)
class InputRounding:
    """Rounds inputs. `scale`, `zero`: of a constant format; `scale` of nvfp4: its divisor."""

    format: InputFormat
    scale: float = 1.0
    zero: float = 0.0

    @classmethod
    def of_range(cls, given: InputFormat, largest: float) -> InputRounding:
        """With the constant scale for which the largest input gets the largest code, if the format has one. The
        divisor of nvfp4 makes the scale of the block with the largest input the largest float8.
        """
        top = 127.5 if given.kind == "int8" else LARGEST_FLOAT8
        scale = LARGEST_FLOAT8 * LARGEST_FLOAT4 / largest if given.kind == "nvfp4" else largest / top
        return cls(given, scale) if given.is_calibrated else cls(given)

    def __call__(self, x: Tensor) -> Tensor:
        """The rounded numbers of `x (..., features)` in its type."""
        rounded = self.rounded(x.detach().float()).to(x.dtype)
        return x + (rounded - x).detach() if x.requires_grad and torch.is_grad_enabled() else rounded

    def rounded(self, x: Tensor) -> Tensor:
        """The rounded numbers of `x (..., features)` in float32."""
        if self.format.kind in ("nvfp4", "mxfp4"):
            return self._blocks(x)
        codes, scale, zero = self.codes(x)
        return codes.float().sub_(zero).mul_(scale)

    def codes(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`(codes, scale, zero)` of a format of 8 bits: float8 or whole numbers, of each token or of all."""
        scale, zero = (
            self._per_token(x) if self.format.dynamic else (x.new_full((), self.scale), x.new_full((), self.zero))
        )
        if self.format.kind == "fp8":
            codes = (x / scale).clamp_(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(torch.float8_e4m3fn)
        else:
            codes = (x / scale).add_(zero).round_().clamp_(-128, 127)
        return codes, scale, zero

    def row_codes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`(codes, scale)` of a format of 8 bits without zero points for `x (rows, features)`: int8 or float8, and
        the scale of each row, `(rows, 1)`. On a GPU one kernel computes them.
        """
        is_float = self.format.kind == "fp8"
        if eight_bits.takes(x):
            constant = None if self.format.dynamic else self.scale
            return eight_bits.round_rows(x, float(LARGEST_FLOAT8) if is_float else 127.5, constant)
        codes, scale, _ = self.codes(x.float())
        return codes if is_float else codes.to(torch.int8), scale.expand(len(x), 1)

    def _per_token(self, x: Tensor) -> tuple[Tensor, Tensor]:
        low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
        if self.format.symmetric:
            # A tensor: by a number, GPUs multiply with the reciprocal, which rounds differently.
            half = x.new_full((), LARGEST_FLOAT8 if self.format.kind == "fp8" else 127.5)
            scale = torch.maximum(-low, high) / half
            zero = torch.zeros_like(scale)
        else:
            scale = (high - low) / 255
            zero = (-128 - low / torch.where(scale == 0, 1.0, scale)).clamp(-128, 127).round()
        return torch.where(scale == 0, torch.finfo(x.dtype).eps, scale), zero

    def _blocks(self, x: Tensor) -> Tensor:
        """Rounded to 4-bit floats, in blocks of columns."""
        groups = x.unflatten(-1, (-1, GROUPS["nvfp4" if self.format.kind == "nvfp4" else "mxfp4"]))
        largest = groups.abs().amax(-1, keepdim=True)
        if self.format.kind == "nvfp4":
            wanted = (largest / LARGEST_FLOAT4 * self.scale).clamp(max=LARGEST_FLOAT8)
            stored = wanted.to(torch.float8_e4m3fn).float()
            scale = torch.where(stored == 0, _SMALLEST_FLOAT8_SCALE, stored) / self.scale
        else:
            mantissa, exponent = torch.frexp(largest)  # largest = mantissa * 2^exponent, mantissa from 0.5 to 1
            exponent = exponent - 3 + (mantissa >= 0.875).to(exponent.dtype)
            scale = torch.exp2(torch.where(largest == 0, -127, exponent).clamp(min=-127).float())
        numbers = float4_values(float4_codes(groups / scale), x.dtype)
        return numbers.mul_(scale).flatten(-2)
