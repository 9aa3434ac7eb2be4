"""ONNX Runtime's integer kernels in torch, equal to the last bit.

Fake-quant in float32 and the same layer in integers differ by some 1e-6 of a step. If that decides a rounding, one
code changes, the next layer's sums change with it, and after a few layers the two are as far apart as 0.5 % of the
output range. (So are the float32 and the float64 simulation of one ResNet-18.) So the arithmetic here is that of the
kernels: exact sums, one multiplication in float32, one rounding.
"""

from __future__ import annotations

import math
import platform
from functools import lru_cache

import torch
from torch import Tensor

Three = tuple[Tensor, Tensor, Tensor]  # of both operands and of the result


def codes_from_zero(x: Tensor, scale: Tensor) -> Tensor:
    """`q - zero_point` of values that are on the grid already, as whole float numbers."""
    return torch.div(x, scale).round_()


def requantized(accumulator: Tensor, multiplier: Tensor, scale: Tensor) -> Tensor:
    """An int32 accumulator on the grid of the output, not clipped yet: `round(acc * multiplier) * scale`.

    `multiplier` is `input scale * weight scale / output scale`, each step rounded to float32, as the kernels fold it.
    """
    return accumulator.mul_(multiplier).round_().mul_(scale)


def add(a: Tensor, b: Tensor, scales: Three, zero_points: Three, machine: str | None = None) -> Tensor:
    """`QLinearAdd` of two tensors on their grids: the sum on the grid of the output, not clipped yet.

    Arm adds in fixed point and rounds halves away from zero, or in float32 if the scales are too far apart for that;
    x86 adds in float32 (fused multiply-add), with the zero points folded into one constant. `machine`: as
    `platform.machine()` names it, by default this one.
    """
    scale_a, scale_b, scale_c = (float(scale) for scale in scales)
    ratio_a, ratio_b = float32(scale_a / scale_c), float32(scale_b / scale_c)
    codes_a, codes_b = codes_from_zero(a, scales[0]), codes_from_zero(b, scales[1])
    zero_a, zero_b, zero_c = (float(zero_point.round()) for zero_point in zero_points)
    if _is_arm(machine):
        fixed = _fixed_point(ratio_a, ratio_b)
        if fixed is None:  # the values themselves are added (a fused multiply-add), then quantized
            value_b = codes_b.double().mul_(scale_b).float()
            total = codes_a.double().mul_(scale_a).add_(value_b).float().div_(scale_c).add_(zero_c)
            return on_grid(total.round_().sub_(zero_c), scales[2], a)
        shift, multiplier_a, multiplier_b = fixed
        total = codes_a.double().mul_(multiplier_a).add_(codes_b.double().mul_(multiplier_b))
        half_away = total.abs().add_(float(1 << (shift - 1))).mul_(2.0**-shift).floor_().mul_(total.sign())
        return on_grid(half_away, scales[2], a)
    # Products of float32 numbers are exact in float64: these are fused multiply-adds except for a double rounding.
    constant = float32(zero_c - float32(ratio_a * zero_a + float32(ratio_b * zero_b)))
    partial = codes_b.add_(zero_b).double().mul_(ratio_b).add_(constant).float()
    total = codes_a.add_(zero_a).double().mul_(ratio_a).add_(partial).float()
    return on_grid(total.round_().sub_(zero_c), scales[2], a)


def multiply(a: Tensor, b: Tensor, scales: Three, zero_points: Three, machine: str | None = None) -> Tensor:
    """`QLinearMul`: the product on the grid of the output, not clipped yet; rounded with the zero point added.

    Arm adds the zero point in the same step (fused multiply-add), x86 in a second one.
    """
    scale_a, scale_b, scale_c = (float(scale) for scale in scales)
    multiplier = float32(float32(scale_a * scale_b) / scale_c)
    zero_c = float(zero_points[2].round())
    product = codes_from_zero(a, scales[0]).mul(codes_from_zero(b, scales[1])).double().mul_(multiplier)
    if not _is_arm(machine):
        product = product.float()
    total = product.add_(zero_c).float()
    return on_grid(total.round_().sub_(zero_c), scales[2], a)


def saturates_as_hard_sigmoid(scale: float, zero_point: float, qmin: int, qmax: int) -> bool:
    """Whether codes of this grid, clipped at its ends, correspond to values clipped at 0 and 1."""
    return round(zero_point) == qmin and (qmax - qmin) * scale <= 1 + scale / 2


def on_grid(codes: Tensor, scale: Tensor, like: Tensor) -> Tensor:
    """Codes counted from zero as values, of the type and on the device of `like`."""
    return codes.to(like.dtype).mul_(scale.to(like.device, like.dtype))


def _is_arm(machine: str | None) -> bool:
    return (machine or platform.machine()) in ("aarch64", "arm64")


@lru_cache(maxsize=1024)
def _fixed_point(ratio_a: float, ratio_b: float) -> tuple[int, int, int] | None:
    """(shift, multipliers of 22 bits); None if the ratios of the scales are too far apart for it."""
    if not all(2.0**-14 <= ratio < 256.0 for ratio in (ratio_a, ratio_b)):
        return None
    shift = 22 - math.frexp(max(ratio_a, ratio_b))[1]
    first, second = (round(float32(ratio * 2.0**shift)) for ratio in (ratio_a, ratio_b))
    return (shift, first, second) if 13 <= shift <= 31 and max(first, second) < 1 << 22 else None


def float32(value: float) -> float:
    """The nearest float32 number."""
    return float(torch.tensor(value, dtype=torch.float64).to(torch.float32))
