"""PACT (Choi et al., 2018): activations clipped at a learned threshold."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from sparsebit.config.section import Section
from sparsebit.config.targets import ACTIVATION, Target
from sparsebit.numerics.fake_quant.gradients import Gradient
from sparsebit.numerics.qparams import SMALLEST_SCALE, check_backend
from sparsebit.quantization.quantizers.base import Quantizer, as_number
from sparsebit.quantization.quantizers.registration import register_quantizer


class PactOptions(Section):
    ALPHA_VALUE: float = Field(10.0, gt=0, description="Where the learned clipping value of `pact` starts.")


@register_quantizer("pact", options=PactOptions)
class PACT(Quantizer):
    """`clamp(x, low, alpha)`, then round to nearest; `alpha` starts at PACT.ALPHA_VALUE and is learned.

    `alpha` is the grid's upper end: scale = alpha / (qmax - zero_point). The zero point is qmin for tensors that were
    never negative during calibration, else the grid's middle; `low` is the grid's lower end.
    """

    TARGETS: ClassVar[tuple[Target, ...]] = (ACTIVATION,)
    GRADIENT: ClassVar[Gradient] = "pact"
    NUMBERS: ClassVar[str] = "pact"
    options: PactOptions
    alpha: Tensor
    is_signed: Tensor

    def make_parameters(self, num_scales: int) -> None:
        self.alpha = nn.Parameter(torch.full((num_scales,), self.options.ALPHA_VALUE))
        self.register_buffer("is_signed", torch.tensor(float(self.spec.symmetric)))

    def calc_qparams_with_minmax(self, min_val: Tensor, max_val: Tensor) -> tuple[Tensor, Tensor]:
        """Only uses the sign of the data: the threshold is PACT's own."""
        if self.fake_fused:
            return self.qparams()
        if min_val.numel() > 1 and self.alpha.numel() == 1:
            self._store("alpha", self.alpha.detach().expand(min_val.numel()))
        self.is_signed.fill_(self.spec.symmetric or bool((min_val < 0).any()))
        check_backend(self.spec, self.zero_point, self.backend, self.name)
        self.calibrated.fill_(True)
        return self.qparams()

    def qparams(self) -> tuple[Tensor, Tensor]:
        alpha, spec = as_number(self.alpha).abs(), self.spec
        # For signed data the middle code: as many codes above as below, or one less. At 1 bit the lower code.
        middle = 0 if spec.symmetric or spec.bits == 1 else 1 << (spec.bits - 1)
        zero_point = torch.where(self.is_signed > 0, middle, spec.qmin).to(alpha).expand_as(alpha)
        return (alpha / (spec.qmax - zero_point).clamp_min(1)).clamp_min(SMALLEST_SCALE), zero_point

    @property
    def scale(self) -> Tensor:  # type: ignore[override]
        return self.qparams()[0].detach()

    @property
    def zero_point(self) -> Tensor:  # type: ignore[override]
        return self.qparams()[1].detach()
