"""`Mix`: the type to which each matrix of a GGUF file is rounded, by its role.

`Q4_K_M` is llama.cpp's: more bits for the output layer, and for v (or q, k and v in one matrix) and down,
whose errors cost most, in half of the blocks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from sparsebit.errors import ConfigError
from sparsebit.llm.gguf.k_quant_blocks import SUPER_BLOCK

KType = Literal["Q4_K", "Q6_K"]
EXACT = "exact"
_SENSITIVE = ("attn_v", "attn_qkv", "ffn_down", "ffn_down_exps")
_ROUTER = "ffn_gate_inp"  # selects the experts: a rounding error would select others
# llama.cpp's choice for rows that are not a whole number of blocks: types with blocks of 32.
SMALL_BLOCKS: dict[KType, Literal["Q5_0", "Q8_0"]] = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}


@dataclass(frozen=True)
class Mix:
    """`file_type`: llama.cpp's name. `usual`: of the blocks' layers. None of the others: as in the model's files.

    `sensitive`: of v, of q, k and v in one matrix, and of down, in the first and last eighth of the blocks, and in
    every third between them.
    """

    file_type: str
    usual: KType
    sensitive: KType | None = None
    embedding: KType | None = None
    output: KType | None = None

    def type_of(self, name: str, num_blocks: int, *, is_tied: bool) -> KType | None:
        """The type of the matrix that has the name `name` in the file; None if it is not rounded.

        `is_tied`: the embedding is the output layer too.
        """
        if name == "token_embd.weight":
            return self.output if is_tied else self.embedding
        if name == "output.weight":
            return self.output
        found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
        if found is None or found[2] == _ROUTER:
            return None
        if self.sensitive and found[2] in _SENSITIVE and _has_more_bits(int(found[1]), num_blocks):
            return self.sensitive
        return self.usual


MIXES = {
    "Q4_K": Mix("MOSTLY_Q4_K_S", "Q4_K"),
    "Q6_K": Mix("MOSTLY_Q6_K", "Q6_K"),
    "Q4_K_M": Mix("MOSTLY_Q4_K_M", "Q4_K", sensitive="Q6_K", embedding="Q4_K", output="Q6_K"),
}


def mix_of(gguf_type: str) -> Mix | None:
    """The mix by its name; None for types that hold the codes of a packed model without rounding."""
    if gguf_type != EXACT and gguf_type not in MIXES:
        raise ConfigError(f"gguf_type={gguf_type!r}: allowed: {EXACT}, {', '.join(MIXES)}")
    return MIXES.get(gguf_type)


def fitting(kind: KType, columns: int) -> str:
    """The type itself, or the one with small blocks if `columns` is not a multiple of 256."""
    return kind if columns % SUPER_BLOCK == 0 else SMALL_BLOCKS[kind]


def _has_more_bits(block: int, num_blocks: int) -> bool:
    eighth = num_blocks // 8
    return block < eighth or block >= 7 * num_blocks // 8 or (block - eighth) % 3 == 2
