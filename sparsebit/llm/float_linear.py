"""`FloatLinear`: a linear layer whose weight stays in 8-bit or 4-bit floats, unpacked while it is multiplied."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.llm.float_weight import FloatKind, FloatWeight
from sparsebit.numerics.spec import LARGEST_FLOAT8

_BLOCK_ELEMENTS = 1 << 22  # of a weight that are unpacked at once


class FloatLinear(nn.Module):
    """`x @ weight.T + bias`, the weight kept as `qweight`, `scales` and `divisor` (see `FloatWeight`).

    Of an fp8 layer the inputs are rounded to float8 too, with a scale for each token, unless `rounds_inputs` is off.
    """

    qweight: Tensor
    scales: Tensor
    divisor: Tensor | None

    def __init__(self, weight: FloatWeight, bias: Tensor | None = None) -> None:
        super().__init__()
        self.kind: FloatKind = weight.kind
        self.in_features, self.out_features = weight.in_features, weight.out_features
        self.bits, self.group_size = weight.bits, weight.group_size
        self.rounds_inputs = weight.kind == "fp8"
        self.register_buffer("qweight", weight.qweight)
        self.register_buffer("scales", weight.scales)
        self.register_buffer("divisor", weight.divisor)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        inputs = ", inputs rounded per token" if self.rounds_inputs else ""
        self.path, self.path_reason = "unpacked", f"{self.kind}: unpacked in blocks{inputs}"

    @property
    def packed(self) -> FloatWeight:
        return FloatWeight(self.kind, self.qweight, self.scales, self.divisor)

    def forward(self, x: Tensor) -> Tensor:
        if self.rounds_inputs:
            x = round_tokens(x)
        weight = self.packed
        count = max(_BLOCK_ELEMENTS // self.in_features, 1)
        parts = []
        for start in range(0, self.out_features, count):
            rows = slice(start, start + count)
            bias = None if self.bias is None else self.bias[rows].to(x.dtype)
            parts.append(F.linear(x, weight.dequantize(x.dtype, rows), bias))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.kind}"

    def _apply(self, fn: object, recurse: bool = True) -> FloatLinear:
        """Another type is for activations: the weight keeps its own."""
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            now = self._buffers[name]
            assert now is not None
            if now.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(now.device)
        return self


def round_tokens(x: Tensor) -> Tensor:
    """`x (..., in)` rounded to float8 with a scale for each token, as servers compute it; straight through backward."""
    scale = x.detach().abs().amax(-1, keepdim=True) / LARGEST_FLOAT8
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    rounded = (x.detach() / scale).clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(torch.float8_e4m3fn).to(x.dtype) * scale
    return x + (rounded - x).detach() if x.requires_grad and torch.is_grad_enabled() else rounded
