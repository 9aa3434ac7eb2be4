"""`FloatLinear`: a linear layer whose weight stays in 8-bit or 4-bit floats.

fp8 weights are multiplied directly by GPUs that can (`torch._scaled_mm`), in bfloat16 models. All others are
unpacked in blocks of rows while they are multiplied.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.llm.layers.float_kinds import FloatKind
from sparsebit.llm.layers.float_weight import FloatWeight
from sparsebit.numerics.spec import LARGEST_FLOAT8

# Elements of a weight that are unpacked at once. On a GPU small blocks would leave it idle between their kernels.
_BLOCK_ELEMENTS = 1 << 22
_BLOCK_ELEMENTS_ON_GPU = 1 << 26
SCALED_PRODUCT = "scaled_mm"
_MULTIPLE = 16  # of rows and columns, required by torch._scaled_mm


class FloatLinear(nn.Module):
    """`x @ weight.T + bias`, the weight kept as `qweight`, `scales` and `divisor` (see `FloatWeight`).

    The inputs of an fp8 layer are rounded to float8 too, with a scale for each token, unless `rounds_inputs` is off.
    `path`: how it is multiplied, "scaled_mm" or "unpacked"; `path_reason`: why the latter.
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
        self._choose()

    def _choose(self) -> None:
        """Choose how the layer is multiplied on its current device."""
        inputs = ", inputs rounded per token" if self.rounds_inputs else ""
        self.path, self.path_reason = "unpacked", f"{self.kind}: unpacked in blocks{inputs}"
        if _takes_scaled_product(self.packed):
            self.path, self.path_reason = SCALED_PRODUCT, ""

    @property
    def packed(self) -> FloatWeight:
        return FloatWeight(self.kind, self.qweight, self.scales, self.divisor)

    def forward(self, x: Tensor) -> Tensor:
        needs_gradient = x.requires_grad and torch.is_grad_enabled()
        if self.rounds_inputs and x.dtype == torch.bfloat16 and not needs_gradient and self.path == SCALED_PRODUCT:
            y = scaled_product(x, self.packed)
            return y if self.bias is None else y + self.bias.to(y.dtype)
        if self.rounds_inputs:
            x = round_tokens(x)
        weight = self.packed
        count = max((_BLOCK_ELEMENTS_ON_GPU if x.is_cuda else _BLOCK_ELEMENTS) // self.in_features, 1)
        parts = []
        for start in range(0, self.out_features, count):
            rows = slice(start, start + count)
            bias = None if self.bias is None else self.bias[rows].to(x.dtype)
            parts.append(F.linear(x, weight.dequantize(x.dtype, rows), bias))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.kind}"

    def _apply(self, fn: object, recurse: bool = True) -> FloatLinear:
        """A conversion to another type applies to activations: the weight keeps its type."""
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            now = self._buffers[name]
            assert now is not None
            if now.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(now.device)
        self._choose()
        return self


def scaled_product(x: Tensor, weight: FloatWeight) -> Tensor:
    """`x (..., in)` in bfloat16 rounded to float8 for each token, times the fp8 weight, summed in float32."""
    numbers, scale = _float8_tokens(x.reshape(-1, weight.in_features))
    if not len(numbers):
        return x.new_empty(*x.shape[:-1], weight.out_features)
    y: Tensor = torch._scaled_mm(
        numbers,
        weight.qweight.t(),
        scale_a=scale.float(),
        scale_b=weight.scales.t().float().contiguous(),
        out_dtype=torch.bfloat16,
    )
    return y.reshape(*x.shape[:-1], weight.out_features)


def _takes_scaled_product(weight: FloatWeight) -> bool:
    device = weight.qweight.device
    if weight.kind != "fp8" or not _is_nvidia(device):
        return False
    fits = not (weight.in_features % _MULTIPLE or weight.out_features % _MULTIPLE)
    # A scale for each row and token needs compute capability 9.0.
    return fits and bool(torch.cuda.get_device_capability(device) >= (9, 0))


def _is_nvidia(device: torch.device) -> bool:
    return device.type == "cuda" and not torch.version.hip


def _float8_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.detach().abs().amax(-1, keepdim=True) / LARGEST_FLOAT8
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return (x.detach() / scale).clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(torch.float8_e4m3fn), scale


def round_tokens(x: Tensor) -> Tensor:
    """`x (..., in)` rounded to float8 with a scale for each token, as servers compute it; straight through backward."""
    numbers, scale = _float8_tokens(x)
    rounded = numbers.to(x.dtype) * scale
    return x + (rounded - x).detach() if x.requires_grad and torch.is_grad_enabled() else rounded
