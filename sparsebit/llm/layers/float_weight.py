"""`FloatWeight`: the weight of one linear layer as 8-bit or 4-bit floats with scales; `FloatLinear`: such a layer.

| kind | values | scales | a value is |
|---|---|---|---|
| fp8 | float8_e4m3fn `(out, in)` | one per row, `(out, 1)` | `number * scale` |
| mxfp4 | E2M1, two in a byte, `(out, in / 2)` | exponent + 127 per 32 columns, uint8 | `number * 2^exponent` |
| nvfp4 | E2M1, two in a byte, `(out, in / 2)` | float8_e4m3fn per 16 columns | `number * scale / divisor` |

The divisor of nvfp4 is a power of two here: products of E2M1 and E4M3 numbers have six bits, so every value is exact in
bfloat16, in which other readers unpack the weight. fp8 weights are multiplied directly by GPUs that can
(`torch._scaled_mm`), in bfloat16 models. All others are unpacked in blocks of rows while they are multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.errors import CheckpointError
from sparsebit.llm.layers.float_kinds import FLOAT_KINDS, GROUPS, FloatKind
from sparsebit.llm.layers.input_kinds import SCHEMES
from sparsebit.llm.layers.input_rounding import InputRounding
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
    symmetric: ClassVar = True

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

    def scale_numbers(self) -> Tensor:
        """The number by which each group is multiplied, `(out, groups)` in float32."""
        scales = scale_values(self.scales, self.kind, torch.float32)
        return scales if self.divisor is None else scales / self.divisor

    def with_numbers(self, numbers: Tensor) -> FloatWeight:
        """The same scales with other numbers of the format, `(out, in)`."""
        if self.kind == "fp8":
            return replace(self, qweight=numbers.to(torch.float8_e4m3fn).cpu())
        return replace(self, qweight=pack_float4(float4_codes(numbers)).cpu())

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
def round_to_floats(
    weight: Tensor, kind: FloatKind, *, search: bool, stored: torch.dtype, most: float | None = None
) -> FloatWeight:
    """`weight (out, in)` to nearest, by scales of the range or the least error; `stored`: the type of fp8's scales.
    `most`: the largest number of all weights that share the divisor of nvfp4; None: of this one.
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
        best = _best(groups, [usual + move for move in ((0, 1, -1) if search else (0,))], torch.exp2)
        return _packed(kind, groups, (best + _BIAS).clamp(0, 254).to(torch.uint8), None)
    top = (largest.max() if most is None else largest.new_full((), most)).clamp(min=2.0**-100) / LARGEST_FLOAT4
    divisor = torch.exp2(torch.floor(torch.log2(LARGEST_FLOAT8 / top))).reshape(1)
    wanted = largest / LARGEST_FLOAT4 * divisor
    # The largest number becomes 6, or up to 1.67 times it (clipped), or down to 3.75. With 4 the numbers below it are
    # nearer together: Cook et al., "Four Over Six" (2025). Scales that can be stored, but not zero.
    factors = (1.0, *(1 - 0.05 * step for step in range(1, 9)), *(1 + 0.05 * step for step in range(1, 13)))
    candidates = [
        (wanted * factor).clamp(2.0**-9, LARGEST_FLOAT8).to(torch.float8_e4m3fn).float()
        for factor in (factors if search else factors[:1])
    ]
    best = _best(groups, candidates, lambda scales: scales / divisor)
    return _packed(kind, groups, best.to(torch.float8_e4m3fn), divisor)


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


# Elements of a weight that are unpacked at once. On a GPU small blocks would leave it idle between their kernels.
_BLOCK_ELEMENTS = 1 << 22
_BLOCK_ELEMENTS_ON_GPU = 1 << 26
SCALED_PRODUCT = "scaled_mm"
_MULTIPLE = 16  # of rows and columns, required by torch._scaled_mm


class FloatLinear(nn.Module):
    """`x @ weight.T + bias`, the weight kept as `qweight`, `scales` and `divisor` (see `FloatWeight`).

    `inputs`: how the input is rounded; None: for fp8, to float8 with a scale for each token, for others not at all.
    `path`: how it is multiplied, "scaled_mm" or "unpacked"; `path_reason`: why the latter.
    """

    qweight: Tensor
    scales: Tensor
    divisor: Tensor | None

    def __init__(self, weight: FloatWeight, bias: Tensor | None = None, *, inputs: InputRounding | None = None) -> None:
        super().__init__()
        self.inputs = InputRounding(SCHEMES["fp8"]) if inputs is None and weight.kind == "fp8" else inputs
        self.kind: FloatKind = weight.kind
        self.in_features, self.out_features = weight.in_features, weight.out_features
        self.bits, self.group_size = weight.bits, weight.group_size
        self.register_buffer("qweight", weight.qweight)
        self.register_buffer("scales", weight.scales)
        self.register_buffer("divisor", weight.divisor)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self._choose()

    def _choose(self) -> None:
        """Choose how the layer is multiplied on its current device."""
        inputs = "" if self.inputs is None else f", inputs rounded to {self.inputs.format.kind}"
        is_scaled = bool(inputs) and _takes_scaled_product(self.packed)
        self.path = SCALED_PRODUCT if is_scaled else "unpacked"
        self.path_reason = "" if is_scaled else f"{self.kind}: unpacked in blocks{inputs}"

    @property
    def packed(self) -> FloatWeight:
        return FloatWeight(self.kind, self.qweight, self.scales, self.divisor)

    def forward(self, x: Tensor) -> Tensor:
        weight, needs_gradient = self.packed, x.requires_grad and torch.is_grad_enabled()
        is_half = x.dtype == torch.bfloat16
        if self.inputs is not None and is_half and not needs_gradient and self.path == SCALED_PRODUCT:
            y = scaled_product(x, weight, self.inputs)
            return y if self.bias is None else y + self.bias.to(y.dtype)
        x = x if self.inputs is None else self.inputs(x)
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


def scaled_product(x: Tensor, weight: FloatWeight, inputs: InputRounding) -> Tensor:
    """`x (..., in)` in bfloat16 rounded to float8, times the fp8 weight, summed in float32."""
    if not x.numel():
        return x.new_empty(*x.shape[:-1], weight.out_features)
    numbers, scale = inputs.row_codes(x.reshape(-1, weight.in_features))
    by_row = scale.contiguous(), weight.scales.t().float().contiguous()
    half = torch.bfloat16
    y: Tensor = torch._scaled_mm(numbers, weight.qweight.t(), scale_a=by_row[0], scale_b=by_row[1], out_dtype=half)
    return y.reshape(*x.shape[:-1], weight.out_features)


def _takes_scaled_product(weight: FloatWeight) -> bool:
    device = weight.qweight.device
    fits = weight.kind == "fp8" and not (weight.in_features % _MULTIPLE or weight.out_features % _MULTIPLE)
    # A scale for each row and token needs compute capability 9.0.
    return fits and _is_nvidia(device) and bool(torch.cuda.get_device_capability(device) >= (9, 0))


def _is_nvidia(device: torch.device) -> bool:
    return device.type == "cuda" and not torch.version.hip
