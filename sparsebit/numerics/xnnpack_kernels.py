"""XNNPACK's integer kernels in torch, equal to the last bit on x86 (measured with ExecuTorch 1.5.1).

They differ from ONNX Runtime's in four places: a float becomes a code by a product with the scale's reciprocal, a sum
is rounded in fixed point with halves upwards, a product is rounded before its zero point is added, and a mean of an
image is a sum of codes with one multiplication. Layers are alike (`integer_kernels.requantized`).
"""

from __future__ import annotations

import math

from torch import Tensor

from sparsebit.numerics.integer_kernels import Three, codes_from_zero, float32, on_grid

# Of the larger of the two ratios of scales; XNNPACK creates no addition outside.
SMALLEST_RATIO, LARGEST_RATIO = 2.0**-10, 2.0**8


def quantized(x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
    """Floats on the grid: `round(x * (1 / scale))`, where a division would round some ties to the other side."""
    step, zero = scale.abs(), zero_point.round()
    return x.mul(step.reciprocal()).round_().clamp_(qmin - zero, qmax - zero).mul_(step)


def add(a: Tensor, b: Tensor, scales: Three, zero_points: Three) -> Tensor:
    """The sum on the grid of the output, not clipped yet: multipliers of 21 bits, a shift, and halves upwards."""
    scale_a, scale_b, scale_c = (float(scale) for scale in scales)
    ratio_a, ratio_b = float32(scale_a / scale_c), float32(scale_b / scale_c)
    shift = 21 - math.frexp(max(ratio_a, ratio_b))[1]
    multiplier_a, multiplier_b = (round(ratio * 2.0**shift) for ratio in (ratio_a, ratio_b))
    total = (
        codes_from_zero(a, scales[0]).double() * multiplier_a + codes_from_zero(b, scales[1]).double() * multiplier_b
    )
    return on_grid(total.add_(float(1 << (shift - 1))).mul_(2.0**-shift).floor_(), scales[2], a)


def multiply(a: Tensor, b: Tensor, scales: Three, zero_points: Three) -> Tensor:
    """The product on the grid of the output, not clipped yet."""
    scale_a, scale_b, scale_c = (float(scale) for scale in scales)
    multiplier = float32(float32(scale_a * scale_b) / scale_c)
    product = codes_from_zero(a, scales[0]).mul(codes_from_zero(b, scales[1]))
    return on_grid(product.mul_(multiplier).round_(), scales[2], a)


def image_mean(x: Tensor, scale: Tensor, output_scale: Tensor) -> Tensor:
    """The mean over the last two dimensions, which stay, on the grid of the output, not clipped yet."""
    share = float32(1 / (x.shape[-1] * x.shape[-2]))
    multiplier = float32(float32(float(scale) / float(output_scale)) * share)
    sums = codes_from_zero(x, scale).double().sum((-2, -1), keepdim=True).float()
    return on_grid(sums.mul_(multiplier).round_(), output_scale, x)
