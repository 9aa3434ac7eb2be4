"""Round to nearest on a calibrated grid, gradients straight through: `uniform`, `adaround` and `fp8`."""

from __future__ import annotations

from typing import ClassVar

from sparsebit.backends import Format
from sparsebit.config.targets import Target
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.quantization.quantizers.registration import register_quantizer


@register_quantizer("uniform")
class Uniform(Quantizer):
    """Scale and zero point come from calibration and are fixed."""


@register_quantizer("adaround")
class AdaRound(Quantizer):
    """For weights: the codes come from a reconstruction (`sparsebit.quantization.reconstruct`).

    It stores the learned rounding in the weights, so that the quantizer itself rounds to nearest. A config that names
    it gets the step `reconstruct: {METHOD: adaround}` among its ALGORITHMS.
    """

    TARGETS: ClassVar[tuple[Target, ...]] = ("weight",)


@register_quantizer("fp8")
class Float8(Quantizer):
    """The largest weight of a tensor or channel is mapped to 448, the largest float8_e4m3fn.

    For weights only: runtimes store them so and compute in float.
    """

    TARGETS: ClassVar[tuple[Target, ...]] = ("weight",)
    FORMAT: ClassVar[Format] = "float8"
