"""PACT (Choi et al., 2018): activations clipped at a learned threshold."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from sparsebit.numerics import dispatch
from sparsebit.quantization.quantizers.base import Quantizer, Target, register_quantizer


@register_quantizer("pact")
class PACT(Quantizer):
    """`clamp(x, low, alpha)`, then round to nearest; `alpha` starts at PACT.ALPHA_VALUE and is learned.

    `low` is 0 for tensors that were never negative during calibration, else -alpha. The grid follows alpha:
    scale = (alpha - low) / (qmax - qmin) on affine grids, alpha / qmax on symmetric ones.
    """

    TARGETS: ClassVar[tuple[Target, ...]] = ("feature",)
    alpha: Tensor
    is_signed: Tensor

    def make_parameters(self, num_scales: int) -> None:
        start = float(getattr(self.options, "ALPHA_VALUE", 10.0))
        self.alpha = nn.Parameter(torch.full(() if num_scales == 1 else (num_scales,), start))
        self.register_buffer("is_signed", torch.tensor(self.spec.symmetric))

    def calc_qparams_with_minmax(self, min_val: Tensor, max_val: Tensor) -> None:
        """Only the sign of the data is taken over: the threshold is PACT's own."""
        if min_val.numel() > 1 and self.alpha.numel() == 1:
            self._store("alpha", self.alpha.detach().expand(min_val.numel()))
        self.is_signed.fill_(self.spec.symmetric or bool((min_val < 0).any()))
        self.calibrated.fill_(True)

    def qparams(self) -> tuple[Tensor, Tensor]:
        alpha = self.alpha.detach().abs()
        if self.spec.symmetric:
            return alpha / max(self.spec.qmax, 1), torch.zeros_like(alpha)
        steps = self.spec.qmax - self.spec.qmin
        scale = torch.where(self.is_signed, 2 * alpha, alpha) / steps
        zero_point = torch.where(self.is_signed, round(steps / 2), 0) + self.spec.qmin
        return scale, zero_point.to(scale).expand_as(scale)

    @property
    def scale(self) -> Tensor:  # type: ignore[override]
        return self.qparams()[0]

    @property
    def zero_point(self) -> Tensor:  # type: ignore[override]
        return self.qparams()[1]

    def fake_quantize(self, x: Tensor) -> Tensor:
        from sparsebit.numerics.qparams import broadcast_to

        alpha = broadcast_to(self.alpha.abs(), x.shape, self.spec.granularity).to(x.dtype)
        clipped = torch.minimum(torch.maximum(x, torch.where(self.is_signed, -alpha, 0.0).to(x.dtype)), alpha)
        scale, zero_point = self.qparams()
        return dispatch.fake_quantize(clipped, scale, zero_point, self.spec, tag=self.name)
