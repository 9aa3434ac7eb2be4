"""`BiasRounding`: the int32 bias of a layer that runs in integers.

The runtime adds the bias to the accumulator of `input code * weight code`, so the bias has the accumulator's scale,
`input scale * weight scale`, and zero point 0.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparsebit.numerics.fake_quant import operator
from sparsebit.quantization.quantizers.base import Quantizer

INT32 = (-(1 << 31), (1 << 31) - 1)
LARGEST_BIAS = float(1 << 30)  # half of int32's range: the products are added to the bias


class BiasRounding(nn.Module):
    """`round(bias / s) * s` with s = input scale * weight scale; the runtime adds the integers `round(bias / s)`.

    It has no state of its own. It returns the bias unchanged if one of the two quantizers is off, and in training: the
    bias's step is some 1e-5 of the output's, so that training would not notice it.
    """

    def __init__(self, name: str, input_quantizer: Quantizer, weight_quantizer: Quantizer) -> None:
        super().__init__()
        self.name = name
        # In a tuple, so that they are not registered as children: they belong to other modules.
        self.sources = (input_quantizer, weight_quantizer)
        self.seen: Tensor | None = None  # the bias in calibration, for a layer that gets its bias as an argument

    @property
    def is_enable(self) -> bool:
        return not self.training and all(quantizer.is_enable for quantizer in self.sources)

    def scale(self) -> Tensor:
        input_scale, weight_scale = (quantizer.qparams()[0].detach() for quantizer in self.sources)
        return input_scale.to(weight_scale.device) * weight_scale

    def forward(self, bias: Tensor) -> Tensor:
        if self.sources[1].observing:
            self.seen = bias.detach()
        if not self.is_enable:
            return bias
        scale = self.scale()
        axis = None if scale.numel() == 1 else 0
        return operator.fake_quantize(bias, scale, scale.new_zeros(()), axis, 0, *INT32, "ste", self.name)

    @torch.no_grad()
    def make_room(self, bias: Tensor) -> None:
        """Raise the weight scales of channels whose bias would not fit into int32.

        Such a channel's weights are negligible compared with its bias (a dead channel after batch-norm folding): a
        coarser grid costs little, an overflow would be large.
        """
        weight = self.sources[1]
        scale, smallest = weight.qparams()[0].detach(), self.smallest_scale(bias)
        if bool((scale < smallest).any()):
            weight.store_qparams(torch.maximum(scale, smallest), weight.qparams()[1])

    def smallest_scale(self, bias: Tensor) -> Tensor:
        """The weight scales below which this bias would not fit into int32, one per scale."""
        source, weight = self.sources
        scale = weight.qparams()[0].detach()
        smallest = bias.detach().to(scale.device).abs().float() / (source.qparams()[0].detach() * LARGEST_BIAS)
        return smallest.max() if scale.numel() == 1 else smallest

    def extra_repr(self) -> str:
        return "int32"
