"""8-bit floating-point weights, float8_e4m3fn."""

from __future__ import annotations

from typing import ClassVar

from sparsebit.backends import Format
from sparsebit.config.targets import Target
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.quantization.quantizers.registration import register_quantizer


@register_quantizer("fp8")
class Float8(Quantizer):
    """The largest weight of a tensor or channel is mapped to 448, the largest float8; gradients straight through.

    For weights only: runtimes store them so and compute in float.
    """

    TARGETS: ClassVar[tuple[Target, ...]] = ("weight",)
    FORMAT: ClassVar[Format] = "float8"
