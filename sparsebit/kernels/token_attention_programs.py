"""The Triton programs of `token_attention`: partial softmax sums over parts of the places, and their combination."""

from __future__ import annotations

import triton
import triton.language as tl

_LOWEST = tl.constexpr(-3.0e38)  # instead of -inf, because -inf - -inf is NaN


@triton.jit
def _admitted(mask_ptr, mask_place, start, end, SCANNED: tl.constexpr):
    """The first admitted place from `start` on, and the one after the last; without any, `end` and `start`."""
    first, last = end, start
    for at in range(start, end, SCANNED):
        places = at + tl.arange(0, SCANNED)
        is_admitted = tl.load(mask_ptr + places * mask_place, mask=places < end, other=0) != 0
        first = tl.minimum(first, tl.min(tl.where(is_admitted, places, end), 0))
        last = tl.maximum(last, tl.max(tl.where(is_admitted, places + 1, start), 0))
    return first, last


@triton.jit
def attend_parts(
    query_ptr, key_ptr, value_ptr, mask_ptr, sums_ptr, stats_ptr, scale,
    num_shared, num_rows, num_places, width, value_width, part_size,
    query_batch, query_head, key_batch, key_head, key_place, value_batch, value_head, value_place,
    mask_batch, mask_place,
    HAS_MASK: tl.constexpr, ROWS: tl.constexpr, PLACES: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    SCANNED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program: the `num_rows` heads that share a key head of one sequence, over one part of the places.

    It writes `sums`: exp2(score - largest) times the values, and `stats`: largest and the sum of the exponentials.
    Places before the first or after the last admitted one of the part are not read; for a part without any, it writes a
    sum of 0 and no `sums`.
    """
    pair, part, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    sequence, head = (pair // num_shared).to(tl.int64), (pair % num_shared).to(tl.int64)
    rows, columns, value_columns = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, VALUE_WIDTH)
    is_row, is_column, is_value = rows < num_rows, columns < width, value_columns < value_width
    start = part * part_size
    end = tl.minimum(start + part_size, num_places)
    mask_ptr += sequence * mask_batch
    if HAS_MASK:
        start, end = _admitted(mask_ptr, mask_place, start, end, SCANNED)
    of_query = query_ptr + sequence * query_batch + (head * num_rows + rows)[:, None] * query_head + columns[None, :]
    query = tl.load(of_query, mask=is_row[:, None] & is_column[None, :], other=0.0)
    key_ptr += sequence * key_batch + head * key_head
    value_ptr += sequence * value_batch + head * value_head
    largest = tl.full((ROWS,), _LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, VALUE_WIDTH), tl.float32)
    for at in tl.range(start, end, PLACES, num_stages=STAGES):
        places = at + tl.arange(0, PLACES)
        is_inside, far = places < end, places.to(tl.int64)[:, None]
        of_key, of_value = key_ptr + far * key_place + columns[None, :], value_ptr + far * value_place + value_columns
        key = tl.load(of_key, mask=is_inside[:, None] & is_column[None, :], other=0.0)
        value = tl.load(of_value, mask=is_inside[:, None] & is_value[None, :], other=0.0)
        is_admitted = is_inside
        if HAS_MASK:
            is_admitted &= tl.load(mask_ptr + places * mask_place, mask=is_inside, other=0) != 0
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(is_admitted[None, :], scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(largest - higher)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        largest = higher
    index = (pair.to(tl.int64) * num_rows + rows) * num_parts + part
    tl.store(stats_ptr + 2 * index, largest, mask=is_row)
    tl.store(stats_ptr + 2 * index + 1, total, mask=is_row)
    of_sums = sums_ptr + index[:, None] * value_width + value_columns[None, :]
    tl.store(of_sums, sums, mask=(is_row & (total != 0))[:, None] & is_value[None, :])


@triton.jit
def combine_parts(
    sums_ptr, stats_ptr, output_ptr, num_parts, value_width, PARTS: tl.constexpr, VALUE_WIDTH: tl.constexpr
):
    """One program: one head of one sequence. Without any place that is read, the output is 0, as torch's is."""
    head = tl.program_id(0).to(tl.int64)
    parts, columns = tl.arange(0, PARTS), tl.arange(0, VALUE_WIDTH)
    index = head * num_parts + parts
    largest = tl.load(stats_ptr + 2 * index, mask=parts < num_parts, other=_LOWEST)
    total = tl.load(stats_ptr + 2 * index + 1, mask=parts < num_parts, other=0.0)
    is_read = total != 0
    weight = tl.where(is_read, tl.exp2(largest - tl.max(largest, 0)), 0.0)
    sums = tl.load(
        sums_ptr + index[:, None] * value_width + columns[None, :],
        mask=is_read[:, None] & (columns < value_width)[None, :],
        other=0.0,
    )
    whole = tl.sum(weight * total, 0)
    answer = tl.sum(sums * weight[:, None], 0) / tl.where(whole == 0, 1.0, whole)
    tl.store(
        output_ptr + head * value_width + columns, answer.to(output_ptr.dtype.element_ty), mask=columns < value_width
    )
