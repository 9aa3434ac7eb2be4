"""`PackedWeight`: the weight of one linear layer as packed codes, scales and zero points; `(code - zero) * scale`.

It is the common form of all file formats and of all rounding methods. `packed_linear` multiplies it in plain torch:
blocks of its rows are unpacked while they are multiplied, so the dense weight is never in memory as a whole.
`definition` is the reference to which faster kernels (`kernel_layouts.py`) are compared.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
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
        shapes = [None if one is None else tuple(one.shape) for one in (self.qweight, self.scales, self.zeros)]
        words = groups[0], num_words(self.in_features, self.bits)
        if self.in_features % self.group_size or shapes not in ([words, groups, groups], [words, groups, None]):
            raise CheckpointError(
                f"packed weight of {self.in_features} columns, {self.bits} bits, groups of {self.group_size}: "
                "codes {}, scales {}, zero points {} do not belong together".format(*shapes)
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
        """Whether float16 holds the scales, up to a half unit in the last place; some formats have no other type."""
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


# Weights that are unpacked at once: 4 MiB in float32, which stays in the cache of a core or near it.
_BLOCK_ELEMENTS = 1 << 20
# On a GPU small blocks would leave it idle between their kernels: 128 MiB in bfloat16, more than most layers have.
_BLOCK_ELEMENTS_ON_GPU = 1 << 26
# `_few_rows` is used up to this many rows of x. One row on x86: 1.4 times as fast for 4 bits, 1.2 times for 2, the
# same for 3 and 8; at 16 rows about the same for all.
_MOST_FEW_ROWS = 16


def packed_linear(x: Tensor, packed: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """`x (..., in)` times the packed weight: the values are those of `packed.dequantize` in the type of `x`."""
    if x.dtype == torch.float32 and not x.is_cuda and 0 < x.numel() <= _MOST_FEW_ROWS * packed.in_features:
        y = _few_rows(x.reshape(-1, packed.in_features), packed).reshape(*x.shape[:-1], packed.out_features)
        return y if bias is None else y + bias.to(x.dtype)
    return definition(x, packed, bias)


def definition(x: Tensor, packed: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """The reference for faster ways: blocks of rows are dequantized to the type of `x`, one at a time."""
    blocks = [
        F.linear(x, _dense(packed, rows, x.dtype), None if bias is None else bias[rows].to(x.dtype))
        for rows in _row_blocks(packed)
    ]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, -1)


def packed_transposed(y: Tensor, packed: PackedWeight) -> Tensor:
    """`y (..., out)` times the weight itself: the gradient of `packed_linear`, a block of rows at a time."""
    flat = y.reshape(-1, packed.out_features)
    first, *others = _row_blocks(packed)
    found = flat[:, first] @ _dense(packed, first, y.dtype)
    for rows in others:
        found = found.addmm_(flat[:, rows], _dense(packed, rows, y.dtype))
    return found.reshape(*y.shape[:-1], packed.in_features)


def _dense(packed: PackedWeight, rows: slice, dtype: torch.dtype) -> Tensor:
    codes = unpack(packed.qweight[rows], packed.bits, packed.in_features)
    zeros = None if packed.zeros is None else packed.zeros[rows]
    return dequantize(codes, packed.scales[rows], zeros, packed.bits, dtype)


def _few_rows(x: Tensor, packed: PackedWeight) -> Tensor:
    """`x (rows, in)` in float32. Codes are multiplied directly, and each group's sum is scaled afterwards.

    `sum (code - zero) scale x = scale (sum code x - zero sum x)` within a group, so that the weight is neither shifted
    nor scaled. Codes that share a byte are neighbours: those at one place of all bytes are multiplied with every
    second (4 bits) or fourth (2 bits) column of x, and need not be brought in order.
    """
    groups, size = packed.scales.shape[1], packed.group_size
    # How many codes share a byte; 1 if codes cross the borders of bytes or bytes those of groups.
    num_planes = 8 // packed.bits
    is_whole = 8 % packed.bits == 0 and size % num_planes == 0 and sys.byteorder == "little"
    num_planes = num_planes if is_whole else 1
    planes = (x[:, plane::num_planes] for plane in range(num_planes))
    columns = [plane.unflatten(1, (groups, -1)).transpose(0, 1).contiguous() for plane in planes]
    sums = x.unflatten(1, (groups, size)).sum(-1).t()[:, :, None]  # (groups, rows, 1)
    blocks = []
    for rows in _row_blocks(packed):
        product = torch.zeros(())
        for plane, codes in enumerate(_planes(packed, rows, num_planes)):
            weight = codes.to(torch.float32).unflatten(1, (groups, -1)).permute(1, 2, 0)
            product = torch.baddbmm(product, columns[plane], weight, beta=min(plane, 1))
        product -= sums * (1 << packed.bits - 1 if packed.zeros is None else packed.zeros[rows].t()[:, None, :])
        product *= packed.scales[rows].t()[:, None, :]
        blocks.append(product.sum(0))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, -1)


def _planes(packed: PackedWeight, rows: slice, num_planes: int) -> list[Tensor]:
    """The codes of some rows as uint8: those of every `num_planes`-th column, starting at each of the first ones."""
    words = packed.qweight[rows]
    if num_planes == 1:
        return [unpack(words, packed.bits, packed.in_features)]
    octets = words.contiguous().view(torch.uint8)[:, : packed.in_features // num_planes]
    mask = (1 << packed.bits) - 1
    return [(octets >> packed.bits * plane) & mask for plane in range(num_planes)]


def _row_blocks(packed: PackedWeight) -> list[slice]:
    most = _BLOCK_ELEMENTS_ON_GPU if packed.qweight.is_cuda else _BLOCK_ELEMENTS
    count = max(most // packed.in_features, 1)
    return [slice(start, start + count) for start in range(0, packed.out_features, count)]
