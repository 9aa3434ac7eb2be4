"""Fast training steps, with the same values and gradients. Only `qat/training.py` imports it, if it is there."""

from __future__ import annotations

import sparsebit.kernels  # noqa: F401  # the fused steps start its kernels
from sparsebit.quantization.speed.acceleration import Acceleration
from sparsebit.quantization.speed.compiler.inductor_options import with_options
from sparsebit.quantization.speed.savings import Savings

__all__ = ["Acceleration", "Savings", "with_options"]
