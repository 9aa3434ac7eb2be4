"""Low-bit codes packed densely into 32-bit words, and back.

Code `i` of a row takes the bits from `i * bits` on of the row's words, the lowest bit first; a code may begin in one
word and end in the next. 32 codes fill exactly `bits` words. This is the layout of compressed-tensors
(`pack-quantized`) along a row, and of GPTQ checkpoints along a column.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebit.errors import SpecError

WORD = 32
MAX_PACKED_BITS = 8


def num_words(num_codes: int, bits: int) -> int:
    """How many words a row of this many codes takes.

    >>> num_words(128, 4), num_words(128, 3), num_words(33, 3)
    (16, 12, 4)
    """
    return -(-num_codes * bits // WORD)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes from 0 to `2**bits - 1`, of any integer type, `(..., n)`, as int32 words, `(..., num_words(n, bits))`.

    >>> pack(torch.tensor([[1, 2, 3, 0, 0, 0, 0, 0]]), bits=4)
    tensor([[801]], dtype=torch.int32)
    """
    low, high = (int(codes.min()), int(codes.max())) if codes.numel() else (0, 0)
    if not 1 <= bits <= MAX_PACKED_BITS or not 0 <= low <= high < 1 << bits:
        raise SpecError(
            f"codes from {low} to {high} in {bits} bits: allowed: 1 to {MAX_PACKED_BITS} bits, codes of 0 to 2^bits - 1"
        )
    count = codes.shape[-1]
    if 8 % bits == 0 and sys.byteorder == "little":  # no code crosses the border of a byte
        parts = pad(codes.to(torch.uint8), (0, -count % (WORD // bits))).unflatten(-1, (-1, 8 // bits))
        octets: Tensor = parts[..., 0].clone()
        for place in range(1, 8 // bits):
            octets |= parts[..., place] << (place * bits)
        # Not `contiguous()`: a tensor without elements keeps a stride that cannot be viewed as words.
        return octets.reshape(-1).view(torch.int32).view(*codes.shape[:-1], num_words(count, bits))
    padded = pad(codes.to(torch.int64), (0, -count % WORD)).unflatten(-1, (-1, WORD))
    words: Tensor = padded.new_zeros(*padded.shape[:-1], bits)
    for place in range(WORD):
        word, shift = divmod(place * bits, WORD)
        shifted = padded[..., place] << shift
        words[..., word] |= shifted & 0xFFFFFFFF
        if shift + bits > WORD:
            words[..., word + 1] |= shifted >> WORD
    return words.to(torch.int32).flatten(-2)[..., : num_words(count, bits)].contiguous()


def unpack(words: Tensor, bits: int, num_codes: int) -> Tensor:
    """The codes of `pack` as uint8, `(..., num_codes)`."""
    if words.dtype != torch.int32 or words.shape[-1] != num_words(num_codes, bits) or bits not in range(1, 9):
        raise SpecError(
            f"words of type {words.dtype} and shape {tuple(words.shape)}: {num_codes} codes of {bits} bits (allowed: 1 "
            f"to {MAX_PACKED_BITS}) are {num_words(num_codes, bits)} words of int32 a row"
        )
    mask = (1 << bits) - 1
    if 8 % bits == 0 and sys.byteorder == "little":  # no code crosses the border of a byte
        # Not `contiguous()`: transposed words of one column keep a stride that cannot be viewed as bytes.
        octets = words.reshape(-1).view(torch.uint8).view(*words.shape[:-1], 4 * words.shape[-1])
        if bits < 8:
            octets = torch.stack([(octets >> shift) & mask for shift in range(0, 8, bits)], dim=-1).flatten(-2)
        return octets[..., :num_codes]
    padded = pad(words, (0, -words.shape[-1] % bits)).unflatten(-1, (-1, bits))
    codes = torch.empty(*padded.shape[:-1], WORD, dtype=torch.uint8, device=words.device)
    for place in range(WORD):
        word, shift = divmod(place * bits, WORD)
        found = padded[..., word] >> shift
        if shift + bits > WORD:  # a shift to the right repeats the sign: only the lowest bits belong to the word
            own = WORD - shift
            found = (found & ((1 << own) - 1)) | (padded[..., word + 1] << own)
        codes[..., place] = found & mask
    return codes.flatten(-2)[..., :num_codes]
