"""DoReFa (Zhou et al., 2016): weights squashed by tanh before they are quantized."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from sparsebit.quantization.quantizers.base import Quantizer, Target, register_quantizer


@register_quantizer("dorefa")
class DoReFa(Quantizer):
    """Quantizes tanh(w) on the grid that the observer finds for tanh(w).

    The paper divides by max|tanh(w)| and leaves the layer's gain to the batch norm behind it; here the range keeps the
    gain, so that a trained network stays itself at first. With MINMAX the grid is the paper's. While training, the grid
    follows the weights at every step, as in the paper.
    """

    TARGETS: ClassVar[tuple[Target, ...]] = ("weight",)

    def transform(self, x: Tensor) -> Tensor:
        return x.tanh()

    def fake_quantize(self, x: Tensor) -> Tensor:
        if self.training and x.requires_grad:
            self.update_observer(x)
            self.calc_qparams()
        return super().fake_quantize(x)
