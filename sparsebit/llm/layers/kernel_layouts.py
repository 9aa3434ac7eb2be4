"""The orders of codes that kernels require: which layers each supports, and conversions to its order and back.

A row of the table is one kernel. All of them compute `x @ ((codes - zeros) * scales).T`; `activations` is the type to
which a CPU kernel rounds x.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from sparsebit.errors import ConfigError
from sparsebit.kernels import eight_bits
from sparsebit.kernels.packed_linear import DTYPES, GROUP_SIZES, FragmentWeight, dense_weight, fragment_weight, runs_on
from sparsebit.kernels.packed_linear import packed_linear as fragment_linear
from sparsebit.kernels.tensor_core_layout import BITS, BLOCK, restore
from sparsebit.llm.layers.input_rounding import InputRounding
from sparsebit.llm.layers.packed_weight import PackedWeight

Activations = Literal["float32", "bfloat16", "int8"]
ACTIVATIONS: tuple[Activations, ...] = ("float32", "bfloat16", "int8")
_MIDDLE = 8  # the zero point that the kernels for CPUs assume


def as_activations(name: str) -> Activations:
    """The name as an `Activations` value; an unknown one is an error."""
    found = next((known for known in ACTIVATIONS if known == name), None)
    if found is None:
        raise ConfigError(f"activations={name!r}: allowed: {', '.join(ACTIVATIONS)}")
    return found


@dataclass(frozen=True)
class Prepared:
    """A weight in a kernel's own form. `offsets`: what the kernel needs besides words and scales, if anything.

    `inputs`: how the layer's inputs are rounded, for a kernel that multiplies their codes.
    """

    words: Tensor
    scales: Tensor
    offsets: Tensor | None
    in_features: int
    out_features: int
    group_size: int
    inputs: InputRounding | None = None


@dataclass(frozen=True)
class KernelLayout:
    """`refusal(packed, dtype)`: why the kernel does not support a weight with activations of that type, or None.

    `codes`: restores the codes `(out, in)` of a prepared weight. `dense`: its values `(out, in)`, for the backward of
    training; None if the kernel rounds its input, so that training does not use it. `join`: weights side by side as
    one, and each as a view of it; None if the order of the words does not allow that, for these weights or for any.
    """

    name: str
    activations: Activations
    refusal: Callable[[PackedWeight, torch.dtype], str | None]
    prepare: Callable[[PackedWeight, torch.dtype], Prepared]
    product: Callable[[Tensor, Prepared], Tensor]
    codes: Callable[[Prepared], Tensor]
    dense: Callable[[Prepared], Tensor] | None = None
    join: Callable[[Sequence[Prepared]], tuple[Prepared, list[Prepared]] | None] | None = None


def _refusal_of_int4pack(packed: PackedWeight, dtype: torch.dtype) -> str | None:
    if not hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"):
        return "this torch has no _weight_int4pack_mm_for_cpu"
    return _needs(packed, sizes=(32, 64, 128, 256), multiple_of=16)


def _prepare_int4pack(packed: PackedWeight, dtype: torch.dtype) -> Prepared:
    words = torch.ops.aten._convert_weight_to_int4pack_for_cpu(packed.codes().to(torch.int32), 1)
    scales = packed.scales.t().to(torch.bfloat16)
    offsets = _offsets(packed, scales.float())
    # The kernel adds them to the weights. Rounded to bfloat16, their error is that of the scales; as a separate op,
    # they took a fifth of the time of a token.
    added = torch.zeros_like(scales) if offsets is None else offsets.to(torch.bfloat16)
    return _prepared(packed, words, torch.stack([scales, added], -1).contiguous(), None)


def _int4pack(x: Tensor, weight: Prepared) -> Tensor:
    product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
        x.to(torch.bfloat16).contiguous(), weight.words, weight.group_size, weight.scales.contiguous()
    )
    return product.to(x.dtype)


def _codes_of_int4pack(weight: Prepared) -> Tensor:
    # The order inside differs between processors; the product with 1 returns the codes in any order.
    ones = torch.ones_like(weight.scales)
    ones[..., 1] = 0
    eye = torch.eye(weight.in_features, dtype=torch.bfloat16)
    found: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(eye, weight.words, weight.group_size, ones)
    return (found.t().float() + _MIDDLE).round().to(torch.uint8)


def _refusal_of_dynamic(packed: PackedWeight, dtype: torch.dtype) -> str | None:
    if not hasattr(torch.ops.aten, "_dyn_quant_matmul_4bit"):
        return "this torch has no _dyn_quant_matmul_4bit"
    return _needs(packed, sizes=(*range(32, packed.in_features, 32), packed.in_features), multiple_of=8)


def _prepare_dynamic(packed: PackedWeight, dtype: torch.dtype) -> Prepared:
    codes = packed.codes()
    octets = codes[:, ::2] | codes[:, 1::2] << 4
    # The fast kernels require scales in bfloat16 for groups, in float32 for whole rows.
    per_row = packed.group_size == packed.in_features
    scales = packed.scales.to(torch.float32 if per_row else torch.bfloat16)
    words = torch.ops.aten._dyn_quant_pack_4bit_weight(
        octets, scales, None, packed.group_size, packed.in_features, packed.out_features
    )
    kept = scales.t().float().contiguous()
    return _prepared(packed, words, kept, _offsets(packed, kept))


def _dynamic(x: Tensor, weight: Prepared) -> Tensor:
    rows = x.float().contiguous()  # the operator ignores strides, and would read the memory after the first row
    sizes = weight.group_size, weight.in_features, weight.out_features
    product: Tensor = torch.ops.aten._dyn_quant_matmul_4bit(rows, weight.words, *sizes)
    if weight.offsets is None:
        return product.to(x.dtype)
    sums = x.unflatten(-1, (-1, weight.group_size)).sum(-1, dtype=torch.float32)
    return torch.addmm(product.float(), sums, weight.offsets).to(x.dtype)


def _codes_of_dynamic(weight: Prepared) -> Tensor:
    eye = torch.eye(weight.in_features)
    sizes = weight.group_size, weight.in_features, weight.out_features
    found: Tensor = torch.ops.aten._dyn_quant_matmul_4bit(eye, weight.words, *sizes)
    scales = weight.scales.repeat_interleave(weight.group_size, 0)
    return (found / scales + _MIDDLE).round().t().to(torch.uint8)


def _refusal_of_fragments(packed: PackedWeight, dtype: torch.dtype) -> str | None:
    device = packed.qweight.device
    if not runs_on(device):
        return f"{device}: the kernel needs an NVIDIA GPU of compute capability 9.0 or newer"
    if dtype not in DTYPES:
        return f"activations of {dtype}: the kernel takes bfloat16 and float16"
    if packed.in_features % BLOCK:
        return f"{packed.in_features} columns: the kernel takes multiples of {BLOCK}"
    return _needs(packed, sizes=GROUP_SIZES, multiple_of=1, bits=BITS)


def _prepare_fragments(packed: PackedWeight, dtype: torch.dtype) -> Prepared:
    weight = fragment_weight(packed.codes(), packed.scales.to(dtype), packed.zeros, packed.bits)
    return _prepared(packed, weight.words, weight.scales, weight.zeros)


def _fragment_weight(weight: Prepared) -> FragmentWeight:
    """Scales and zero points of a joined weight are views with gaps."""
    return FragmentWeight(weight.words, weight.scales, weight.offsets, weight.out_features)


def _side_by_side(weights: Sequence[Prepared]) -> tuple[Prepared, list[Prepared]]:
    """The weights as one, in which the words of each are rows: outputs of fragments are padded to whole tiles."""
    first = weights[0]
    words = torch.cat([weight.words for weight in weights])
    scales = torch.cat([weight.scales for weight in weights], 1)
    zeros = [weight.offsets for weight in weights if weight.offsets is not None]
    offsets = torch.cat(zeros, 1) if zeros else None
    whole = Prepared(words, scales, offsets, first.in_features, scales.shape[1], first.group_size)
    widths = [weight.scales.shape[1] for weight in weights]
    all_words, all_scales = words.split([len(weight.words) for weight in weights]), scales.split(widths, 1)
    all_offsets = [None] * len(weights) if offsets is None else offsets.split(widths, 1)
    parts = zip(weights, all_words, all_scales, all_offsets, strict=True)
    return whole, [replace(weight, words=one, scales=two, offsets=three) for weight, one, two, three in parts]


_LEAST_ROWS, _MULTIPLE = 17, 8  # required by torch._int_mm on a GPU


def _refusal_of_integers(packed: PackedWeight, dtype: torch.dtype) -> str | None:
    if not packed.symmetric:
        return "zero points: torch._int_mm has none"
    if packed.in_features % _MULTIPLE:
        return f"{packed.in_features} columns: torch._int_mm takes multiples of {_MULTIPLE}"
    return _needs(packed, sizes=(packed.in_features,), multiple_of=_MULTIPLE, bits=(8,))


def _prepare_integers(packed: PackedWeight, dtype: torch.dtype) -> Prepared:
    words = (packed.codes().to(torch.int16) - 128).to(torch.int8)
    return _prepared(packed, words, packed.scales.t().float().contiguous(), None)


def _integers(x: Tensor, weight: Prepared) -> Tensor:
    """The codes of the inputs times those of the weight, summed in int32, times both scales."""
    assert weight.inputs is not None
    codes, scale = weight.inputs.row_codes(x)
    missing = max(_LEAST_ROWS - len(x), 0) if x.is_cuda else 0
    rows = torch.nn.functional.pad(codes, (0, 0, 0, missing)) if missing else codes
    sums = torch._int_mm(rows, weight.words.t())[: len(x)]
    if eight_bits.takes(x):
        return eight_bits.scale_sums(sums, scale, weight.scales, x.dtype)
    return (sums * scale * weight.scales).to(x.dtype)


INT4PACK = KernelLayout(
    *("int4pack", "bfloat16", _refusal_of_int4pack, _prepare_int4pack, _int4pack, _codes_of_int4pack),
    # Words are ordered in blocks of at most 64 outputs: whole blocks can be concatenated.
    join=lambda weights: None if any(weight.out_features % 64 for weight in weights) else _side_by_side(weights),
)
DYNAMIC = KernelLayout("dyn_quant_4bit", "int8", _refusal_of_dynamic, _prepare_dynamic, _dynamic, _codes_of_dynamic)
FRAGMENTS = KernelLayout(
    *("cuda_fragments", "float32", _refusal_of_fragments, _prepare_fragments),
    product=lambda x, weight: fragment_linear(x, _fragment_weight(weight)),
    codes=lambda weight: restore(weight.words)[: weight.out_features].to(torch.uint8),
    dense=lambda weight: dense_weight(_fragment_weight(weight)),
    join=_side_by_side,
)
# For layers whose inputs are rounded to int8 without zero points. Rounding is the layer's own, not the kernel's.
INTEGERS = KernelLayout(
    *("int_mm", "float32", _refusal_of_integers, _prepare_integers, _integers),
    codes=lambda weight: (weight.words.to(torch.int16) + 128).to(torch.uint8),
)
LAYOUTS: dict[str, KernelLayout] = {layout.name: layout for layout in (INT4PACK, DYNAMIC, FRAGMENTS, INTEGERS)}


def _needs(
    packed: PackedWeight, *, sizes: tuple[int, ...], multiple_of: int, bits: tuple[int, ...] = (4,)
) -> str | None:
    if packed.bits not in bits:
        return f"{packed.bits} bits: the kernel has {', '.join(map(str, bits))}"
    if packed.group_size not in sizes:
        return f"groups of {packed.group_size}: the kernel does not take them"
    if packed.out_features % multiple_of:
        return f"{packed.out_features} outputs: the kernel takes multiples of {multiple_of}"
    return None


def _prepared(packed: PackedWeight, words: Tensor, scales: Tensor, offsets: Tensor | None) -> Prepared:
    return Prepared(words, scales, offsets, packed.in_features, packed.out_features, packed.group_size)


def _offsets(packed: PackedWeight, scales: Tensor) -> Tensor | None:
    """`(8 - zero) * scale`, `(groups, out)`: the zero point of the kernels for CPUs is 8."""
    return None if packed.zeros is None else (_MIDDLE - packed.zeros.t().float()) * scales
