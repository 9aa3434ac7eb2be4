"""Blocks of 32 weights as GGUF files keep them: Q4_0, Q5_0 and Q8_0.

Q4_0 is a float16 scale `d` and 16 bytes, `w = (q - 8) d`; code `i` is the lower half of byte `i`, code `i + 16` the
upper one. Q5_0 has the fifth bits of all codes in 4 bytes after the scale, `w = (q - 16) d`. Q8_0 is a scale and 32
signed bytes, `w = q d`. None of them has a zero point. A packed weight is stored in the smallest that can hold
`code - zero` without rounding: Q4_0 for up to 3 bits and for 4 without zero points, Q5_0 for 4 with zero points, Q8_0
for 8 bits.

Other weights are rounded: to Q4_K and Q6_K (see `k_quant_math`), or to Q5_0 and Q8_0 if a row is not a
whole number of their blocks of 256.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from sparsebit.errors import DeploymentError
from sparsebit.llm.gguf.k_quant_math import (
    Q4_K_BYTES,
    Q4_K_GROUP,
    Q4K,
    Q6_K_BYTES,
    Q6_K_GROUP,
    Q6K,
    SUPER_BLOCK,
    fit_q4_k,
    fit_q6_k,
    fit_symmetric,
)
from sparsebit.llm.layers.float_weight import Weight
from sparsebit.llm.layers.packed_weight import PackedWeight

BlockType = Literal["Q4_0", "Q5_0", "Q8_0"]
BLOCK = 32
# Weights and bytes of a block.
BYTES: dict[str, tuple[int, int]] = {
    "Q4_0": (BLOCK, 18),
    "Q5_0": (BLOCK, 22),
    "Q8_0": (BLOCK, 34),
    "Q4_K": (SUPER_BLOCK, Q4_K_BYTES),
    "Q6_K": (SUPER_BLOCK, Q6_K_BYTES),
}
_MIDDLE = {"Q4_0": 8, "Q5_0": 16}


def block_type(bits: int, symmetric: bool) -> BlockType:
    """The type whose blocks can hold codes of this many bits."""
    return "Q8_0" if bits > 4 else "Q4_0" if symmetric or bits < 4 else "Q5_0"


def why_not(packed: PackedWeight) -> str | None:
    """Why blocks cannot hold the weight; None, if they can."""
    if packed.group_size % BLOCK:
        return f"groups of {packed.group_size}: GGUF needs multiples of {BLOCK}"
    if packed.bits == 8 and packed.zeros is not None:
        return "8 bits with zero points: Q8_0 has none; quantize with --symmetric"
    if not packed.has_half_scales or bool((packed.scales < 0).any()):
        return "scales that float16 cannot hold"
    return None


def blocks_of(packed: PackedWeight) -> Tensor:
    """The rows of the weight as bytes, `(out, in / 32 * bytes of a block)`."""
    scales, zeros = _repeated(packed.scales, packed, BLOCK), None
    if packed.zeros is not None:
        zeros = _repeated(packed.zeros, packed, BLOCK)
    assert scales is not None, "why_not refuses other groups"
    middle = 1 << packed.bits - 1 if zeros is None else zeros[..., None].to(torch.int16)
    numbers = packed.codes().unflatten(1, (-1, BLOCK)).to(torch.int16) - middle
    kind = block_type(packed.bits, packed.symmetric)
    return _to_bytes(kind, scales[..., None].to(torch.float16), numbers)


def rounded_blocks(weight: Weight | Tensor, kind: str) -> Tensor:
    """The rows as bytes of a type that rounds, with searched scales; codes of up to 4 bits are kept if they can be."""
    values = weight.float() if isinstance(weight, Tensor) else weight.dequantize(torch.float32)
    if not bool(values.isfinite().all()):
        raise DeploymentError("a weight has values that are not finite")
    known = weight if isinstance(weight, PackedWeight) and weight.bits <= 4 else None
    if kind == "Q4_K":
        return fit_q4_k(values, None if known is None else _scales_and_mins(known)).to_bytes()
    if kind == "Q6_K":
        return fit_q6_k(values, None if known is None else _repeated(known.scales, known, Q6_K_GROUP)).to_bytes()
    lowest, highest = (-16, 15) if kind == "Q5_0" else (-127, 127)
    scales, numbers = fit_symmetric(values, BLOCK, lowest, highest)
    return _to_bytes(kind, scales[..., None], numbers.to(torch.int16))


def values_of(kind: str, data: Tensor) -> Tensor:
    """The inverse: `(rows, columns)` float32 of rows of bytes."""
    if kind == "Q4_K":
        return Q4K.from_bytes(data).values()
    if kind == "Q6_K":
        return Q6K.from_bytes(data).values()
    blocks = data.unflatten(1, (-1, BYTES[kind][1]))
    scales, rest = blocks[..., :2].contiguous().view(torch.float16).float(), blocks[..., 2:]
    if kind == "Q8_0":
        return torch.flatten(rest.contiguous().view(torch.int8).float() * scales, 1)
    codes = torch.cat([rest[..., -16:] & 15, rest[..., -16:] >> 4], -1)
    if kind == "Q5_0":
        fifth = rest[..., :4, None] >> torch.arange(8, dtype=torch.uint8) & 1
        codes = codes | fifth.flatten(-2) << 4
    return torch.flatten((codes.float() - _MIDDLE[kind]) * scales, 1)


def _to_bytes(kind: str, scales: Tensor, numbers: Tensor) -> Tensor:
    """`scales (rows, blocks, 1)` float16, `numbers (rows, blocks, 32)` int16."""
    parts = [scales.contiguous().view(torch.uint8)]
    if kind == "Q8_0":
        parts.append(numbers.to(torch.int8).view(torch.uint8))
    else:
        codes = (numbers + _MIDDLE[kind]).to(torch.uint8)
        if kind == "Q5_0":
            places = torch.arange(8, dtype=torch.uint8)
            parts.append(((codes >> 4).unflatten(-1, (4, 8)) << places).sum(-1, dtype=torch.uint8))
        parts.append(codes[..., :16] & 15 | codes[..., 16:] << 4)
    return torch.cat(parts, -1).flatten(1).contiguous()


def _scales_and_mins(packed: PackedWeight) -> tuple[Tensor, Tensor] | None:
    """Scale and `scale * zero point` of each 32 weights; None, if some of these have several scales."""
    zeros = torch.full_like(packed.scales, 1 << packed.bits - 1) if packed.zeros is None else packed.zeros
    scales = _repeated(packed.scales.float(), packed, Q4_K_GROUP)
    mins = _repeated(packed.scales.float() * zeros.float(), packed, Q4_K_GROUP)
    return None if scales is None or mins is None else (scales, mins)


def _repeated(numbers: Tensor, packed: PackedWeight, columns: int) -> Tensor | None:
    """Numbers of groups for each `columns` weights; None, if some of these have several."""
    return None if packed.group_size % columns else numbers.repeat_interleave(packed.group_size // columns, 1)
