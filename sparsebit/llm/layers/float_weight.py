"""`FloatWeight`: the weight of one linear layer as 8-bit or 4-bit floats with scales.

| kind | values | scales | a value is |
|---|---|---|---|
| fp8 | float8_e4m3fn `(out, in)` | one per row, `(out, 1)` | `number * scale` |
| mxfp4 | E2M1, two in a byte, `(out, in / 2)` | exponent + 127 per 32 columns, uint8 | `number * 2^exponent` |
| nvfp4 | E2M1, two in a byte, `(out, in / 2)` | float8_e4m3fn per 16 columns | `number * scale / divisor` |

The divisor of nvfp4 is a power of two here: products of E2M1 and E4M3 numbers have six bits, so every value is
exact in bfloat16, in which other readers unpack the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from sparsebit.errors import CheckpointError
from sparsebit.llm.layers.float_kinds import FLOAT_KINDS, GROUPS, FloatKind
from sparsebit.llm.layers.packed_weight import PackedWeight
from sparsebit.numerics.float4 import LARGEST_FLOAT4, float4_codes, float4_values, pack_float4, unpack_float4
from sparsebit.numerics.spec import LARGEST_FLOAT8

_BIAS = 127  # of a power of two's exponent


@dataclass(frozen=True)
class FloatWeight:
    """`qweight`, `scales`: as in the table of the module. `divisor (1,)`: for nvfp4, else None."""

    kind: FloatKind
    qweight: Tensor
    scales: Tensor
    divisor: Tensor | None = None

    def __post_init__(self) -> None:
        groups = 1 if self.kind == "fp8" else self.in_features // GROUPS[self.kind]
        if tuple(self.scales.shape) != (self.out_features, groups) or (self.divisor is None) == (self.kind == "nvfp4"):
            raise CheckpointError(
                f"{self.kind} weight of {self.out_features} x {self.in_features}: scales {tuple(self.scales.shape)}, "
                f"divisor {self.divisor}: these do not belong together"
            )

    @property
    def bits(self) -> int:
        return 8 if self.kind == "fp8" else 4

    @property
    def out_features(self) -> int:
        return self.qweight.shape[0]

    @property
    def in_features(self) -> int:
        return self.qweight.shape[1] * (1 if self.kind == "fp8" else 2)

    @property
    def group_size(self) -> int:
        return GROUPS[self.kind] or self.in_features

    @property
    def symmetric(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.qweight.nbytes + self.scales.nbytes + (0 if self.divisor is None else self.divisor.nbytes)

    @property
    def bits_per_weight(self) -> float:
        """Bits of a weight in a file, including its share of scales."""
        return self.bits + 8 * self.scales.element_size() / self.group_size

    def to(self, device: torch.device | str) -> FloatWeight:
        divisor = None if self.divisor is None else self.divisor.to(device)
        return replace(self, qweight=self.qweight.to(device), scales=self.scales.to(device), divisor=divisor)

    def dequantize(self, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:
        """The values of some rows, `(rows, in)`, computed in `dtype`."""
        scales = scale_values(self.scales[rows], self.kind, dtype)
        if self.kind == "fp8":
            return self.qweight[rows].to(dtype) * scales
        if self.divisor is not None:
            scales = scales / self.divisor.to(dtype)
        numbers = float4_values(unpack_float4(self.qweight[rows]), dtype)
        grouped = torch.unflatten(numbers, 1, (scales.shape[1], -1))
        return (grouped * scales[..., None]).flatten(1)

    def to_tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of the weight in a file of ours, by names that begin with `name`."""
        tensors = {f"{name}.{self.kind}": self.qweight, f"{name}.scales": self.scales}
        return tensors | ({} if self.divisor is None else {f"{name}.divisor": self.divisor})

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], name: str) -> FloatWeight:
        kind = next(kind for kind in FLOAT_KINDS if f"{name}.{kind}" in tensors)
        return cls(kind, tensors[f"{name}.{kind}"], tensors[f"{name}.scales"], tensors.get(f"{name}.divisor"))


def scale_values(scales: Tensor, kind: FloatKind, dtype: torch.dtype) -> Tensor:
    """The stored scales as numbers."""
    if kind == "mxfp4":
        return torch.exp2(scales.float() - _BIAS).to(dtype)
    return scales.to(dtype)


@torch.no_grad()
def round_to_floats(weight: Tensor, kind: FloatKind, *, search: bool, stored: torch.dtype) -> FloatWeight:
    """`weight (out, in)` rounded to nearest. `search`: scales with the smallest squared error; else the range's.

    `stored`: the type of the scales of fp8.
    """
    W = weight.detach().float()
    if kind == "fp8":
        smallest = torch.finfo(stored).tiny
        scales = (W.abs().amax(1, keepdim=True) / LARGEST_FLOAT8).clamp(min=smallest).to(stored)
        # Rounded down, the scale would push the largest value beyond the format: it is clamped there.
        numbers = (W / scales.float()).clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8)
        return FloatWeight(kind, numbers.to(torch.float8_e4m3fn).cpu(), scales.cpu())
    groups = W.unflatten(1, (-1, GROUPS[kind]))
    largest = groups.abs().amax(-1)
    if kind == "mxfp4":
        # The specification uses the exponent of the largest value minus that of 6; one above may have a smaller error,
        # one below clips the largest.
        usual = torch.floor(torch.log2(largest.clamp(min=2.0**-120))) - 2
        stored_scales = _best(groups, [usual + move for move in ((0, 1, -1) if search else (0,))], torch.exp2)
        exponents = (stored_scales + _BIAS).clamp(0, 254)
        return _packed(kind, groups, exponents.to(torch.uint8), None)
    top = largest.max().clamp(min=2.0**-100) / LARGEST_FLOAT4
    divisor = torch.exp2(torch.floor(torch.log2(LARGEST_FLOAT8 / top))).reshape(1)
    wanted = largest / LARGEST_FLOAT4 * divisor
    factors = [1 - 0.025 * step for step in range(17)] if search else [1.0]

    def as_number(scales: Tensor) -> Tensor:
        return scales / divisor

    candidates = [_as_float8(wanted * factor) for factor in factors]
    return _packed(kind, groups, _best(groups, candidates, as_number).to(torch.float8_e4m3fn), divisor)


def _as_float8(scales: Tensor) -> Tensor:
    """Round to scales that can be stored, but not to zero."""
    smallest = 2.0**-9
    return scales.clamp(smallest, LARGEST_FLOAT8).to(torch.float8_e4m3fn).float()


def _best(groups: Tensor, candidates: list[Tensor], as_number: Callable[[Tensor], Tensor]) -> Tensor:
    """The candidate `(out, groups)` with the smallest error for each group `(out, groups, columns)`."""
    best, least = candidates[0], torch.full_like(candidates[0], torch.inf)
    for candidate in candidates:
        scale = as_number(candidate)[..., None]
        error = (float4_values(float4_codes(groups / scale), groups.dtype) * scale - groups).square().sum(-1)
        is_better = error < least
        best, least = torch.where(is_better, candidate, best), torch.where(is_better, error, least)
    return best


def _packed(kind: FloatKind, groups: Tensor, scales: Tensor, divisor: Tensor | None) -> FloatWeight:
    numbers = scale_values(scales, kind, torch.float32)
    if divisor is not None:
        numbers = numbers / divisor
    codes = float4_codes(groups / numbers[..., None]).flatten(1)
    return FloatWeight(kind, pack_float4(codes).cpu(), scales.cpu(), None if divisor is None else divisor.cpu())


Weight: TypeAlias = PackedWeight | FloatWeight


def integers(weight: Weight) -> PackedWeight:
    """The weight, which must be one of whole numbers."""
    assert isinstance(weight, PackedWeight)
    return weight
