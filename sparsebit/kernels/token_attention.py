"""`token_attention`: the attention of one token to a cache of keys and values, on a GPU.

torch's kernels run one program per head. A token has few heads and many places in its cache, so most of a GPU
is idle; and with a mask, heads that share keys read copies of them. Here each program computes the heads that
share a key for a part of the places, and a second kernel adds up the parts. Excluded places at the ends of a part, as
the free ones of a cache of fixed size, are not read.
"""

from __future__ import annotations

import logging
import math
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

log = logging.getLogger(__name__)

# The best of a sweep on an H200, over 1 and 8 sequences and 1,024 and 8,192 places (benchmarks/token_attention.py).
_PLACES = 32  # places of the cache that a program reads at once
_PROGRAMS = 4  # for each multiprocessor
_MOST_SCANNED = 1024  # places of the mask
_MOST_PARTS = 64
_STAGES = 3  # loads of places in flight
_FEWEST_ROWS = 16  # of a product on tensor cores
_WIDEST = 256  # channels of a head


def token_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """`softmax(scale * query key^T) value`, for one token of each sequence.

    `query`: `(batch, heads, 1, width)`. `key` and `value`: `(batch, shared heads, places, width)`; as many heads in
    turn share each as there are more. `mask`: boolean, `(batch or 1, 1, 1, places)`, True at places that are read.
    The result is `(batch, heads, 1, value width)`.
    """
    found: Tensor = torch.ops.sparsebit.token_attention(query, key, value, mask, scale)
    return found


def definition(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """`token_attention` in plain torch."""
    times = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(times, 1) for tensor in (key, value))
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


def takes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether `token_attention` has kernels for this attention, if triton is installed."""
    return (
        query.shape[2] == 1
        and query.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and query.dtype == key.dtype == value.dtype
        and max(query.shape[3], value.shape[3]) <= _WIDEST
        and query.shape[1] % key.shape[1] == 0
        and key.shape[:3] == value.shape[:3]
        and (mask is None or (mask.dtype == torch.bool and _fits(mask, key)))
        and not (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad))
        and query.is_cuda
    )


def _fits(mask: Tensor, key: Tensor) -> bool:
    """Whether the mask covers each place of the cache; a shorter one would be read past its end."""
    return mask.dim() == 4 and mask.shape[0] in (1, key.shape[0]) and mask.shape[1:] == (1, 1, key.shape[2])


@cache
def has_triton() -> bool:
    """Must not be called in a compiled step, because a compiler cannot trace it."""
    return find_spec("triton") is not None


@cache
def compiles_on(device: torch.device) -> bool:
    """Whether triton compiles the kernels for this GPU; it needs a C compiler, which torch itself does not."""
    if device.type != "cuda" or not has_triton():
        return False
    query, mask = torch.zeros(1, 2, 1, 16, device=device), torch.ones(1, 1, 1, 4, dtype=torch.bool, device=device)
    key = value = torch.zeros(1, 1, 4, 16, device=device)
    try:
        with torch.cuda.device(device):
            in_parts(query, key, value, mask, 1.0, 1)
    except Exception as error:  # whichever part failed, the kernel cannot be used
        log.warning("the attention of one token stays torch's: triton cannot compile here (%s)", error)
        return False
    return True


@torch.library.custom_op("sparsebit::token_attention", mutates_args=())
def _token_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    if not query.is_cuda or not has_triton():
        return definition(query, key, value, mask, scale)
    with torch.cuda.device(query.device):
        num_processors = torch.cuda.get_device_properties(query.device).multi_processor_count
        return in_parts(query, key, value, mask, scale, num_processors)


@_token_attention.register_fake
def _shape(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[3])


def in_parts(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, num_processors: int
) -> Tensor:
    """Run the two kernels, in as many parts as keep `num_processors` busy."""
    from triton import next_power_of_2

    from sparsebit.kernels.token_attention_programs import attend_parts, combine_parts

    batch, num_heads, _, width = query.shape
    num_shared, num_places, value_width = key.shape[1], key.shape[2], value.shape[3]
    output = query.new_empty(batch, num_heads, 1, value_width)
    if not output.numel():
        return output
    query, key, value = (tensor if tensor.stride(3) == 1 else tensor.contiguous() for tensor in (query, key, value))
    part_size = _part_size(num_places, batch * num_shared, num_processors)
    num_parts = max(1, math.ceil(num_places / part_size))
    sums = query.new_empty(batch * num_heads, num_parts, value_width, dtype=torch.float32)
    stats = query.new_empty(batch * num_heads, num_parts, 2, dtype=torch.float32)
    num_rows, value_columns = num_heads // num_shared, next_power_of_2(value_width)
    attend_parts[(batch * num_shared, num_parts)](
        query, key, value, query if mask is None else mask, sums, stats, scale * math.log2(math.e),
        num_shared, num_rows, num_places, width, value_width, part_size,
        *query.stride()[:2], *key.stride()[:3], *value.stride()[:3],
        *((0, 0) if mask is None else (mask.stride(0) if len(mask) > 1 else 0, mask.stride(3))),
        HAS_MASK=mask is not None, ROWS=max(_FEWEST_ROWS, next_power_of_2(num_rows)), PLACES=_PLACES,
        WIDTH=max(16, next_power_of_2(width)), VALUE_WIDTH=max(16, value_columns),
        SCANNED=min(_MOST_SCANNED, next_power_of_2(part_size)), STAGES=_STAGES,
    )  # fmt: skip
    combine_parts[(batch * num_heads,)](
        sums, stats, output, num_parts, value_width, PARTS=next_power_of_2(num_parts), VALUE_WIDTH=value_columns
    )
    return output


def _part_size(num_places: int, num_pairs: int, num_processors: int) -> int:
    """Places of a part: a multiple of those read at once, so that each processor has about `_PROGRAMS`."""
    num_parts = min(_MOST_PARTS, max(1, _PROGRAMS * num_processors // num_pairs))
    return max(1, math.ceil(num_places / num_parts / _PLACES)) * _PLACES
