"""The weight quantizer that the first Sparsebit called `adaround`: an even grid whose rounding is learned.

The learned rounding is stored in the weights (`sparsebit.quantization.reconstruct`), so the quantizer itself rounds to
nearest. A config that names it gets the step `reconstruct: {METHOD: adaround}` among its ALGORITHMS.
"""

from __future__ import annotations

from typing import ClassVar

from sparsebit.config.targets import Target
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.quantization.quantizers.registration import register_quantizer


@register_quantizer("adaround")
class AdaRound(Quantizer):
    """For weights: scale and zero point come from calibration, the codes from a reconstruction."""

    TARGETS: ClassVar[tuple[Target, ...]] = ("weight",)
