"""Round to nearest on an even grid; gradients straight through."""

from __future__ import annotations

from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.quantization.quantizers.registration import register_quantizer


@register_quantizer("uniform")
class Uniform(Quantizer):
    """Scale and zero point come from calibration and are fixed."""
