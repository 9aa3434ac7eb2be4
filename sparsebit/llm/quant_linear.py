"""`QuantLinear`: a linear layer whose weight stays packed; rows are unpacked in blocks while they are multiplied."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.llm.packed_weight import PackedWeight, dequantize
from sparsebit.numerics.packing import unpack

# Weights that are unpacked at once: 4 MiB in float32, which stays in the cache of a core or near it.
_BLOCK_ELEMENTS = 1 << 20


class QuantLinear(nn.Module):
    """`x @ weight.T + bias` with `weight = (codes - zeros) * scales`, kept as `qweight`, `scales` and `zeros`.

    Buffers: `qweight (out, words)` int32, `scales (out, groups)`, `zeros (out, groups)` uint8 or None if symmetric.
    """

    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None

    def __init__(self, packed: PackedWeight, bias: Tensor | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = packed.in_features, packed.out_features
        self.bits, self.group_size = packed.bits, packed.group_size
        self.register_buffer("qweight", packed.qweight)
        self.register_buffer("scales", packed.scales)
        self.register_buffer("zeros", packed.zeros)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def packed(self) -> PackedWeight:
        return PackedWeight(self.qweight, self.scales, self.zeros, self.bits, self.group_size, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        return packed_linear(x, self.packed, self.bias)

    def extra_repr(self) -> str:
        kind = "symmetric" if self.zeros is None else "asymmetric"
        return f"{self.in_features}, {self.out_features}, bits={self.bits}, group_size={self.group_size}, {kind}"


def packed_linear(x: Tensor, packed: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """`x (..., in)` times the packed weight: blocks of its rows are unpacked to the type of `x`, one at a time.

    This is the definition that faster kernels are compared with; the values are those of `packed.dequantize`.
    """
    count = max(_BLOCK_ELEMENTS // packed.in_features, 1)
    blocks = []
    for start in range(0, packed.out_features, count):
        rows = slice(start, start + count)
        codes = unpack(packed.qweight[rows], packed.bits, packed.in_features)
        zeros = None if packed.zeros is None else packed.zeros[rows]
        weight = dequantize(codes, packed.scales[rows], zeros, packed.bits, x.dtype)
        blocks.append(F.linear(x, weight, None if bias is None else bias[rows].to(x.dtype)))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, -1)


def resident_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers; what is shared counts once."""
    found = {tensor.data_ptr(): tensor.nbytes for tensor in [*model.parameters(), *model.buffers()]}
    return sum(found.values())
