"""Blocks of 32 weights as GGUF files keep them: Q4_0, Q5_0 and Q8_0.

Q4_0 is a float16 scale `d` and 16 bytes, `w = (q - 8) d`; code `i` is the lower half of byte `i`, code `i + 16` the
upper one. Q5_0 has the fifth bits of all codes in 4 bytes behind the scale, `w = (q - 16) d`. Q8_0 is a scale and 32
signed bytes, `w = q d`. None of them has a zero point. A packed weight becomes the smallest that holds `code - zero`
without rounding: Q4_0 for up to 3 bits and for 4 without zero points, Q5_0 for 4 with zero points, Q8_0 for 8 bits.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from sparsebit.llm.packed_weight import PackedWeight

BlockType = Literal["Q4_0", "Q5_0", "Q8_0"]
BLOCK = 32
BYTES: dict[BlockType, int] = {"Q4_0": 18, "Q5_0": 22, "Q8_0": 34}
_MIDDLE = {"Q4_0": 8, "Q5_0": 16}
_LARGEST = torch.finfo(torch.float16).max
_SMALLEST = torch.finfo(torch.float16).tiny


def block_type(bits: int, symmetric: bool) -> BlockType:
    """The type whose blocks hold codes of so many bits."""
    if bits > 4:
        return "Q8_0"
    return "Q4_0" if symmetric or bits < 4 else "Q5_0"


def why_not(packed: PackedWeight) -> str | None:
    """Why blocks cannot hold the weight; None, if they can."""
    if packed.group_size % BLOCK:
        return f"groups of {packed.group_size}: GGUF needs multiples of {BLOCK}"
    if packed.bits == 8 and packed.zeros is not None:
        return "8 bits with zero points: Q8_0 has none; quantize with --symmetric"
    scales = packed.scales.float()
    if not bool(((scales <= _LARGEST) & (scales >= _SMALLEST)).all()):
        return "scales that float16 cannot hold"
    return None


def blocks_of(packed: PackedWeight) -> Tensor:
    """The rows of the weight as bytes, `(out, in / 32 * bytes of a block)`."""
    kind = block_type(packed.bits, packed.symmetric)
    per_scale = packed.group_size // BLOCK
    scales = packed.scales.repeat_interleave(per_scale, 1)[..., None].to(torch.float16)
    zeros: Tensor | int = 1 << packed.bits - 1
    if packed.zeros is not None:
        zeros = packed.zeros.repeat_interleave(per_scale, 1)[..., None].to(torch.int16)
    numbers = packed.codes().unflatten(1, (-1, BLOCK)).to(torch.int16) - zeros
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
