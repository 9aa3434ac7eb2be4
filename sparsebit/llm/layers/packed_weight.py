"""`PackedWeight`: the weight of one linear layer as packed codes, scales and zero points; `(code - zero) * scale`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsebit.errors import CheckpointError
from sparsebit.numerics.packing import num_words, pack, unpack


@dataclass(frozen=True)
class PackedWeight:
    """`qweight (out, words)` int32, `scales (out, groups)`, `zeros (out, groups)` uint8, or None if symmetric.

    Codes count from 0. A symmetric weight has the zero point `2**(bits - 1)` everywhere. `group_size`: columns that
    share a scale, a divisor of `in_features`; `in_features` itself is one scale per row.
    """

    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    group_size: int
    in_features: int

    def __post_init__(self) -> None:
        groups = (self.scales.shape[0], self.in_features // self.group_size)
        if (
            self.in_features % self.group_size
            or tuple(self.qweight.shape) != (groups[0], num_words(self.in_features, self.bits))
            or tuple(self.scales.shape) != groups
            or (self.zeros is not None and tuple(self.zeros.shape) != groups)
        ):
            raise CheckpointError(
                f"packed weight of {self.in_features} columns, {self.bits} bits, groups of {self.group_size}: "
                f"codes {tuple(self.qweight.shape)}, scales {tuple(self.scales.shape)}, zero points "
                f"{None if self.zeros is None else tuple(self.zeros.shape)} do not belong together"
            )

    @classmethod
    def from_codes(cls, codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> PackedWeight:
        """`codes (out, in)` from 0 on, `scales (out, groups)`, `zeros (out, groups)` or None."""
        group_size = codes.shape[1] // scales.shape[1]
        zeros = None if zeros is None else zeros.to(torch.uint8)
        return cls(pack(codes, bits), scales.contiguous(), zeros, bits, group_size, codes.shape[1])

    @property
    def out_features(self) -> int:
        return self.qweight.shape[0]

    @property
    def symmetric(self) -> bool:
        return self.zeros is None

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.qweight.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    @property
    def has_half_scales(self) -> bool:
        """Whether float16 can hold the scales, up to a half unit in the last place; some file formats have no other
        type.
        """
        scales = self.scales.double()
        return bool(((scales.half().double() - scales).abs() <= 2**-10 * scales.abs()).all())

    @property
    def bits_per_weight(self) -> float:
        """Bits of a weight in a file, including its share of scales and zero points (these are packed there)."""
        extra = 8 * self.scales.element_size() + (0 if self.zeros is None else self.bits)
        return self.bits + extra / self.group_size

    def to(self, device: torch.device | str) -> PackedWeight:
        zeros = None if self.zeros is None else self.zeros.to(device)
        return replace(self, qweight=self.qweight.to(device), scales=self.scales.to(device), zeros=zeros)

    def codes(self) -> Tensor:
        """`(out, in)` uint8."""
        return unpack(self.qweight, self.bits, self.in_features)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The values, `(out, in)`, computed in `dtype`."""
        return dequantize(self.codes(), self.scales, self.zeros, self.bits, dtype)

    def to_tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of the weight in a file of ours, by names that begin with `name`."""
        tensors = {f"{name}.qweight": self.qweight, f"{name}.scales": self.scales}
        shape = torch.tensor([self.bits, self.group_size, self.in_features])
        return tensors | {f"{name}.format": shape} | ({} if self.zeros is None else {f"{name}.zeros": self.zeros})

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], name: str) -> PackedWeight:
        bits, group_size, in_features = tensors[f"{name}.format"].tolist()
        qweight, scales = tensors[f"{name}.qweight"], tensors[f"{name}.scales"]
        return cls(qweight, scales, tensors.get(f"{name}.zeros"), bits, group_size, in_features)


def dequantize(codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, dtype: torch.dtype) -> Tensor:
    """`(codes - zeros) * scales` of `codes (rows, in)`, computed in `dtype`."""
    grouped = torch.unflatten(codes, 1, (scales.shape[1], -1)).to(dtype)
    grouped -= 1 << bits - 1 if zeros is None else zeros[..., None].to(dtype)
    grouped *= scales[..., None].to(dtype)
    return grouped.flatten(1)
