"""Learned step sizes: LSQ (Esser et al., ICLR 2020), and LSQ+ (Bhalgat et al., CVPRW 2020) with its zero point."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.numerics.fake_quant.gradients import Gradient
from sparsebit.numerics.fake_quant.operator import is_exporting
from sparsebit.numerics.qparams import SMALLEST_SCALE
from sparsebit.quantization.quantizers.base import Quantizer, as_number
from sparsebit.quantization.quantizers.registration import register_quantizer


@register_quantizer("lsq")
class LSQ(Quantizer):
    """The scale is a parameter from the start; calibration sets its first value.

    Its gradient has LSQ's factor 1/sqrt(N·qmax). Its absolute value is used as the scale, so that a step across
    zero can be undone.
    """

    GRADIENT: ClassVar[Gradient] = "lsq"
    learns_zero_point: ClassVar[bool] = False

    def make_parameters(self, num_scales: int) -> None:
        super().make_parameters(num_scales)
        del self._buffers["scale"]
        self.scale = nn.Parameter(torch.ones(num_scales))
        if self.learns_zero_point and not self.spec.symmetric:
            del self._buffers["zero_point"]
            self.zero_point = nn.Parameter(torch.zeros_like(self.scale))

    def qparams(self) -> tuple[Tensor, Tensor]:
        scale, zero_point = as_number(self.scale), as_number(self.zero_point)
        return scale.abs().clamp_min(SMALLEST_SCALE), zero_point.clamp(self.spec.qmin, self.spec.qmax)

    def operands(self) -> tuple[Tensor, Tensor]:
        """The learned tensors themselves: the operator takes the magnitude, which saves the kernels of `qparams`."""
        if self.spec.symmetric:
            if torch.compiler.is_dynamo_compiling() and not is_exporting():
                return self.scale, torch.zeros_like(self.scale)  # a constant that a compiler can remove
        elif self.learns_zero_point:
            # Values up to 0.25 outside round to the last code; the margin keeps a gradient there. The backward of
            # `hardtanh` starts four kernels fewer than that of `clamp`.
            return self.scale, F.hardtanh(self.zero_point, self.spec.qmin - 0.25, self.spec.qmax + 0.25)
        return self.scale, self.zero_point


@register_quantizer("lsq+", aliases=("lsq_plus",))
class LSQPlus(LSQ):
    """LSQ with a learned zero point on affine grids; on symmetric ones the zero point is fixed at 0."""

    learns_zero_point = True
