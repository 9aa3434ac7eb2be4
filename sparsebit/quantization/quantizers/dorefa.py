"""DoReFa (Zhou et al., 2016): weights squashed by tanh before they are quantized."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from sparsebit.config.targets import Target
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.quantization.quantizers.registration import register_quantizer


@register_quantizer("dorefa")
class DoReFa(Quantizer):
    """Quantizes tanh(w) on the grid that the observer finds for tanh(w).

    The paper divides by max|tanh(w)| and leaves the layer's gain to the batch norm after it; here the range keeps the
    gain, so that a trained network is initially unchanged. With MINMAX the grid is the paper's. While training, the
    grid follows the weights at every step, as in the paper.
    """

    TARGETS: ClassVar[tuple[Target, ...]] = ("weight",)
    ALWAYS_FOLLOWS: ClassVar[bool] = True
    NUMBERS: ClassVar[str] = "dorefa"
    is_squashed = False  # whether the layer's weight is tanh(w) already

    def transform(self, x: Tensor) -> Tensor:
        return x if self.is_squashed else x.tanh()

    @torch.no_grad()
    def prepare_folding(self, weight: Tensor) -> None:
        """Store tanh(w) in the layer from now on, so that a batch norm's factor f can be folded into it.

        f·tanh(w) is the weight that is wanted, and tanh(f·w) is something else.
        """
        weight.copy_(self.transform(weight))
        self.is_squashed = True

    def flags(self) -> list[bool]:
        return [*super().flags(), self.is_squashed]

    def set_flags(self, flags: list[bool]) -> None:
        super().set_flags(flags)
        self.is_squashed = flags[2]
