"""Parts of one tensor, and the quantizers behind them at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.numerics import operator
from sparsebit.numerics.compilation import is_exporting
from sparsebit.numerics.gradients import LEARNING
from sparsebit.numerics.parts import Parts, fake_quantize_parts, form_of
from sparsebit.quantization.ops.quant_opr import QIdentity
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.quantization.quantizers.handing_over import NOTHING
from sparsebit.quantization.quantizers.recognition import is_operator_alone, is_replica, is_watched


def parts(x: Tensor, dim: int, indices: tuple[int, ...]) -> tuple[Tensor, ...]:
    """`x.select(dim, index)` for each of them."""
    if is_exporting() or x.shape[dim] != len(indices):  # a few out of many stay as they are
        return tuple(x.select(dim, index) for index in indices)
    whole = x.unbind(dim)
    return tuple(whole[index] for index in indices)


class QuantizedParts(nn.Module):
    """`parts` for readers that quantize them. In training on a GPU they are quantized here, and the readers told so."""

    def __init__(self, dim: int, indices: Sequence[int], readers: Sequence[QIdentity]) -> None:
        super().__init__()
        self.dim, self.indices = dim, tuple(indices)
        # Each part's reader and its quantizer; in a tuple: their homes are elsewhere.
        self._behind = tuple((reader, reader.input_quantizer) for reader in readers)

    def forward(self, x: Any) -> tuple[Any, ...]:
        if self.training and not torch.compiler.is_compiling() and isinstance(x, Tensor):
            quantized = self._at_once(x)
            if quantized is not None:
                return quantized
        return parts(x, self.dim, self.indices)

    def _at_once(self, x: Tensor) -> tuple[Tensor, ...] | None:
        num_parts = len(self.indices)
        if not torch.is_grad_enabled() or not operator.fuses(x) or is_replica(self):
            return None
        if x.shape[self.dim] != num_parts or form_of(x, self.dim) is None:
            return None
        place_of = {index: place for place, index in enumerate(self.indices)}
        if place_of.keys() != set(range(num_parts)):
            return None
        quantizers = [self._behind[place_of[index]][1] for index in range(num_parts)]  # in the order of memory
        if not self._are_alike(quantizers):
            return None
        scales, zero_points = zip(*(quantizer.operands() for quantizer in quantizers), strict=True)
        numbers = (*scales, *zero_points)
        learned = quantizers[0].GRADIENT in LEARNING and any(number.requires_grad for number in numbers)
        are_single = all(number.numel() == 1 and number.device == x.device for number in numbers)
        if not are_single or not (x.requires_grad or learned):
            return None
        if any(operator.is_watched(x, *both) for both in zip(scales, zero_points, strict=True)):
            return None
        spec, tags = quantizers[0].spec, "\n".join(quantizer.name for quantizer in quantizers)
        how = Parts(self.dim, spec.qmin, spec.qmax, quantizers[0].GRADIENT, tags)
        quantized = fake_quantize_parts(x, how, scales, zero_points)
        for index, quantizer in enumerate(quantizers):
            quantizer.hand_over(NOTHING, quantized[index])
            if quantizer.noted is not None:
                quantizer.noted(quantizer, x.select(self.dim, index), quantized[index])
        return tuple(quantized[index] for index in self.indices)

    def _are_alike(self, quantizers: list[Quantizer]) -> bool:
        """Nothing but the operator stands behind each part, with the same codes and the same gradient."""
        if any(is_watched(reader) for reader, _ in self._behind):
            return False
        first = quantizers[0]
        return first.GRADIENT != "pact" and all(
            is_operator_alone(quantizer)
            and quantizer.GRADIENT == first.GRADIENT
            and (quantizer.spec.qmin, quantizer.spec.qmax) == (first.spec.qmin, first.spec.qmax)
            for quantizer in quantizers
        )
