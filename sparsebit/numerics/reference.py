"""Fake-quant in plain torch: the definition that every fast path is tested against.

`zp = round(zero_point)`, `q = clamp(round(x / scale) + zp, qmin, qmax)`, `y = (q - zp) * scale`: a true division and
round-half-to-even, as ONNX defines QuantizeLinear. Half precision computes in float32 and returns in its own type.
NaN stays NaN; infinity takes the last code. 8-bit floats: `q = float8(clamp(x / scale, -448, 448))`, `y = q * scale`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsebit.numerics.qparams import broadcast_to
from sparsebit.numerics.spec import LARGEST_FLOAT8, TensorSpec


def fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor, spec: TensorSpec) -> Tensor:
    """The nearest value to each of `x` on the grid, in the type of `x`."""
    scale, zero_point = _params(x, scale, zero_point, spec)
    codes = _codes(x, scale, zero_point, spec)
    return ((codes - zero_point) * scale).to(x.dtype)


def quantize(x: Tensor, scale: Tensor, zero_point: Tensor, spec: TensorSpec) -> Tensor:
    """The codes of `x`, in `code_dtype(spec)`. NaN, which has no code, gets that of zero."""
    scale, zero_point = _params(x, scale, zero_point, spec)
    codes = _codes(x, scale, zero_point, spec)
    return torch.where(codes.isnan(), zero_point.clamp(spec.qmin, spec.qmax), codes).to(code_dtype(spec))


def dequantize(
    codes: Tensor, scale: Tensor, zero_point: Tensor, spec: TensorSpec, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The values of the codes: `(codes - zp) * scale`."""
    scale, zero_point = (
        broadcast_to(param.to(compute_dtype(dtype)), codes.shape, spec.granularity) for param in (scale, zero_point)
    )
    return ((codes.to(scale.dtype) - zero_point.round()) * scale).to(dtype)


def nearest_float8(values: Tensor) -> Tensor:
    """Each value rounded to a number of float8_e4m3fn, in its own type; beyond the largest number, to that one."""
    # torch's own cast returns NaN beyond it.
    return values.clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(torch.float8_e4m3fn).to(values.dtype)


def code_dtype(spec: TensorSpec) -> torch.dtype:
    """The smallest type of torch that holds the codes and computes with them, which rules uint16 out."""
    if spec.format == "float8":
        return torch.float8_e4m3fn
    if spec.bits <= 8:
        return torch.int8 if spec.symmetric else torch.uint8
    return torch.int16 if spec.symmetric else torch.int32


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type to compute in: float64 for float64, else float32. Half types cannot count to 2^16."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _params(x: Tensor, scale: Tensor, zero_point: Tensor, spec: TensorSpec) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(x.dtype)
    scale = broadcast_to(scale.to(dtype), x.shape, spec.granularity)
    return scale, broadcast_to(zero_point.to(dtype), x.shape, spec.granularity).round()


def _codes(x: Tensor, scale: Tensor, zero_point: Tensor, spec: TensorSpec) -> Tensor:
    if spec.format == "float8":
        return nearest_float8(x.to(scale.dtype) / scale)
    return ((x.to(scale.dtype) / scale).round() + zero_point).clamp(spec.qmin, spec.qmax)
