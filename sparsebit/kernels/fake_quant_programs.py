"""The Triton programs of fake-quant: one pass over memory forward, one backward; `fake_quant.py` launches them.

Memory access is the whole cost as long as an element takes few instructions. A true division takes twenty, so the
reciprocal is rounded once per row and corrected with two fused multiply-adds (Markstein 1990); the result has the same
bits. The formulas of values and gradients are those of `numerics/fake_quant/gradients.py`. Offsets are 64-bit numbers,
because a tensor may have more than 2^31 elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsebit.numerics.qparams import SMALLEST_SCALE

# Adding and subtracting 1.5 * 2^23 rounds a float32 below 2^22 to the nearest whole number, half to even.
LARGEST_CODE = 1 << 20
_ROUND = tl.constexpr(12582912.0)
_SMALLEST = tl.constexpr(SMALLEST_SCALE)
# The interpreter has no fused multiply-add: it divides.
IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
_HAS_FMA = tl.constexpr(not IS_INTERPRETED)


@triton.jit
def _grid_of(scale_ptr, zero_point_ptr, index, mask, qmin, qmax):
    """Step, its reciprocal, lowest and highest code counted from zero, and the scale's sign, for each `index`."""
    scale = tl.load(scale_ptr + index, mask=mask, other=1.0).to(tl.float32)
    zero_point = tl.load(zero_point_ptr + index, mask=mask, other=0.0).to(tl.float32)
    zero_point = (zero_point + _ROUND) - _ROUND
    step = tl.maximum(tl.abs(scale), _SMALLEST, propagate_nan=tl.PropagateNan.ALL)
    step += zero_point - zero_point  # adds 0, or NaN if the zero point is NaN or infinite, so that it shows
    qmin, qmax = tl.cast(qmin, tl.float32), tl.cast(qmax, tl.float32)  # a compiler passes them with 64 bits
    sign = tl.where(scale < 0, -1.0, tl.where(scale > 0, 1.0, 0.0))
    return step, tl.div_rn(1.0, step), qmin - zero_point, qmax - zero_point, sign


@triton.jit
def _clamped(x, low, high):
    return tl.minimum(tl.maximum(x, low, propagate_nan=tl.PropagateNan.ALL), high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _divided(x, step, reciprocal, low, high):
    """The quotient, correctly rounded between the ends and a code beyond; a value further out stays further out."""
    if _HAS_FMA:
        near = _clamped(x * reciprocal, low - 1.0, high + 1.0)
        return tl.fma(tl.fma(-near, step, x), reciprocal, near)
    else:
        return tl.div_rn(x, step)


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    """An activation function of x and its derivative; the numbers are those of `activations`.

    GELU: the normal distribution as in Abramowitz and Stegun, 26.2.17, to 7.5e-8. It takes a third of the instructions
    of an error function, and is hidden behind memory access.
    """
    if ACTIVATION == 1:
        density = 0.3989422804014327 * tl.exp2(x * x * -0.7213475204444817)
        t = 1.0 / (1.0 + 0.2316419 * tl.abs(x))
        series = t * (0.31938153 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
        tail = density * series
        portion = tl.where(x < 0, tail, 1.0 - tail)
        return x * portion, portion + x * density
    elif ACTIVATION == 2:
        square = x * x
        tanh = 1.0 - 2.0 / (tl.exp(1.5957691216057308 * (x + 0.044715 * square * x)) + 1.0)
        half, portion = 0.5 * x, 0.5 * (1.0 + tanh)
        steepness = 0.7978845608028654 * (1.0 + 0.134145 * square)
        return x * portion, portion + half * (1.0 - tanh * tanh) * steepness
    elif ACTIVATION == 3:
        portion = 1.0 / (1.0 + tl.exp(-x))
        return x * portion, portion * (1.0 + x * (1.0 - portion))
    else:
        return x, x


@triton.jit
def _quantized(x, step, reciprocal, low, high):
    codes = _clamped(_divided(x, step, reciprocal, low, high), low, high)
    return ((codes + _ROUND) - _ROUND) * step  # clamping before rounding is the same, because the ends are integers


@triton.jit
def _gradients(
    grad, x, step, reciprocal, low, high, PACT: tl.constexpr, RELU: tl.constexpr, NEEDS_SCALE: tl.constexpr
):  # fmt: skip
    """The gradients of x and, element by element, of scale and zero point (the latter not yet times the step)."""
    values = _divided(x, step, reciprocal, low, high)
    codes = (_clamped(values, low - 1.0, high + 1.0) + _ROUND) - _ROUND
    clipped = _clamped(codes, low, high)
    inside = (values >= low) & (values <= high) if PACT else clipped == codes
    if RELU:
        inside = inside & (x > 0)
    grad_x = tl.where(inside, grad, 0.0)
    by_scale = grad_x
    if NEEDS_SCALE:
        by_scale = tl.where(inside, 0.0 if PACT else codes - values, clipped) * grad
    return grad_x, by_scale, grad_x - grad


@triton.jit
def forward_rows(
    x_ptr, scale_ptr, zero_point_ptr, y_ptr, qmin, qmax, num_rows, inner, pitch, num_params, inner_tiles,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    row = (tile // inner_tiles) * ROWS + tl.arange(0, ROWS)
    column = (tile % inner_tiles).to(tl.int64) * INNER + tl.arange(0, INNER)
    step, reciprocal, low, high, _ = _grid_of(scale_ptr, zero_point_ptr, row % num_params, row < num_rows, qmin, qmax)
    offset = row.to(tl.int64)[:, None] * inner + column[None, :]
    mask = (row < num_rows)[:, None] & (column < inner)[None, :]
    x_offset = row.to(tl.int64)[:, None] * pitch + column[None, :]
    x = tl.load(x_ptr + x_offset, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION:
        x = _activated(x, ACTIVATION)[0].to(x_ptr.dtype.element_ty).to(tl.float32)
    y = _quantized(x, step[:, None], reciprocal[:, None], low[:, None], high[:, None])
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def forward_columns(
    x_ptr, scale_ptr, zero_point_ptr, y_ptr, qmin, qmax, num_rows, num_params, column_tiles, row_tiles, num_splits,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program has some columns, and every `num_splits`-th of their tiles."""
    split = tl.program_id(0) // column_tiles
    column = (tl.program_id(0) % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < num_params
    step, reciprocal, low, high, _ = _grid_of(scale_ptr, zero_point_ptr, column, is_column, qmin, qmax)
    for tile in tl.range(split, row_tiles, num_splits, num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        offset = row.to(tl.int64)[:, None] * num_params + column[None, :]
        mask = (row < num_rows)[:, None] & is_column[None, :]
        x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        y = _quantized(x, step[None, :], reciprocal[None, :], low[None, :], high[None, :])
        tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def backward_rows(
    grad_ptr, x_ptr, scale_ptr, zero_point_ptr, grad_x_ptr,
    by_scale_ptr, by_zero_point_ptr, grad_scale_ptr, grad_zero_point_ptr, counter_ptr,
    qmin, qmax, factor, outer, inner, pitch, num_params, inner_tiles, num_tiles, num_splits,
    PACT: tl.constexpr, RELU: tl.constexpr, ACTIVATION: tl.constexpr,
    NEEDS_X: tl.constexpr, NEEDS_SCALE: tl.constexpr, NEEDS_ZERO_POINT: tl.constexpr,
    ROWS: tl.constexpr, INNER: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """A program has one parameter, and every `num_splits`-th of its tiles.

    With one parameter for all (`SPLITS` > 0), the program that ends last adds up the sums, in their order.
    """
    param, split = tl.program_id(0) // num_splits, tl.program_id(0) % num_splits
    step, reciprocal, low, high, sign = _grid_of(scale_ptr, zero_point_ptr, param, True, qmin, qmax)
    factor = tl.cast(factor, tl.float32)
    by_scale = tl.zeros((ROWS, INNER), tl.float32)
    outside = tl.zeros((ROWS, INNER), tl.float32)
    for tile in tl.range(split, num_tiles, num_splits, num_stages=STAGES):
        row = (tile // inner_tiles) * ROWS + tl.arange(0, ROWS)
        column = (tile % inner_tiles).to(tl.int64) * INNER + tl.arange(0, INNER)
        number = (row.to(tl.int64) * num_params + param)[:, None]
        offset = number * inner + column[None, :]
        mask = (row < outer)[:, None] & (column < inner)[None, :]
        x = tl.load(x_ptr + number * pitch + column[None, :], mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        slope = x
        if ACTIVATION:
            x, slope = _activated(x, ACTIVATION)
            x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
        grad_x, more_by_scale, more_outside = _gradients(grad, x, step, reciprocal, low, high, PACT, RELU, NEEDS_SCALE)
        if NEEDS_X:
            if ACTIVATION:
                grad_x *= slope
            tl.store(grad_x_ptr + offset, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
        if NEEDS_SCALE:
            by_scale += more_by_scale
        if NEEDS_ZERO_POINT:
            outside += more_outside
    if NEEDS_SCALE:
        tl.store(by_scale_ptr + tl.program_id(0), tl.sum(tl.sum(by_scale, axis=1), axis=0) * (sign * factor))
    if NEEDS_ZERO_POINT:
        tl.store(by_zero_point_ptr + tl.program_id(0), tl.sum(tl.sum(outside, axis=1), axis=0) * (step * factor))
    if SPLITS > 0 and (NEEDS_SCALE or NEEDS_ZERO_POINT):
        tl.debug_barrier()
        # Programs end in any order, but the last one adds the sums in the programs' order, so that runs repeat bit by
        # bit. `.cg` reads past the L1 cache, which may hold old values; the counter is reset for the next launch.
        num_done = tl.atomic_add(counter_ptr, 1, sem="acq_rel")
        if num_done == num_splits - 1:
            each = tl.arange(0, SPLITS)
            if NEEDS_SCALE:
                found = tl.load(by_scale_ptr + each, mask=each < num_splits, other=0.0, cache_modifier=".cg")
                tl.store(grad_scale_ptr, tl.sum(found, axis=0))
            if NEEDS_ZERO_POINT:
                found = tl.load(by_zero_point_ptr + each, mask=each < num_splits, other=0.0, cache_modifier=".cg")
                tl.store(grad_zero_point_ptr, tl.sum(found, axis=0))
            tl.store(counter_ptr, 0)


@triton.jit
def backward_columns(
    grad_ptr, x_ptr, scale_ptr, zero_point_ptr, grad_x_ptr, by_scale_ptr, by_zero_point_ptr, qmin, qmax, factor,
    num_rows, num_params, column_tiles, row_tiles, num_splits,
    PACT: tl.constexpr, RELU: tl.constexpr,
    NEEDS_X: tl.constexpr, NEEDS_SCALE: tl.constexpr, NEEDS_ZERO_POINT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program has some columns, and every `num_splits`-th of their tiles."""
    split = tl.program_id(0) // column_tiles
    column = (tl.program_id(0) % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < num_params
    step, reciprocal, low, high, sign = _grid_of(scale_ptr, zero_point_ptr, column, is_column, qmin, qmax)
    factor = tl.cast(factor, tl.float32)
    by_scale = tl.zeros((ROWS, COLUMNS), tl.float32)
    outside = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in tl.range(split, row_tiles, num_splits, num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        offset = row.to(tl.int64)[:, None] * num_params + column[None, :]
        mask = (row < num_rows)[:, None] & is_column[None, :]
        x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        grad_x, more_by_scale, more_outside = _gradients(
            grad, x, step[None, :], reciprocal[None, :], low[None, :], high[None, :], PACT, RELU, NEEDS_SCALE
        )
        if NEEDS_X:
            tl.store(grad_x_ptr + offset, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
        if NEEDS_SCALE:
            by_scale += more_by_scale
        if NEEDS_ZERO_POINT:
            outside += more_outside
    place = split * num_params + column
    if NEEDS_SCALE:
        tl.store(by_scale_ptr + place, tl.sum(by_scale, axis=0) * (sign * factor), mask=is_column)
    if NEEDS_ZERO_POINT:
        tl.store(by_zero_point_ptr + place, tl.sum(outside, axis=0) * (step * factor), mask=is_column)


@triton.jit
def _one_of(part, first, second, third):
    """One of three pointers."""
    found = first
    if part == 1:
        found = second
    elif part == 2:
        found = third
    return found


@triton.jit
def forward_stacked(
    x_ptr, y0_ptr, y1_ptr, y2_ptr,
    scale0_ptr, scale1_ptr, scale2_ptr, zero_point0_ptr, zero_point1_ptr, zero_point2_ptr,
    qmin, qmax, num_rows, inner, inner_tiles,
    PARTS: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Rows of x consist of `PARTS` pieces of `inner`; each kind of piece has its own grid, and its own output
    tensor.
    """
    part, tile = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS
    y_ptr = _one_of(part, y0_ptr, y1_ptr, y2_ptr)
    scale_ptr = _one_of(part, scale0_ptr, scale1_ptr, scale2_ptr)
    zero_point_ptr = _one_of(part, zero_point0_ptr, zero_point1_ptr, zero_point2_ptr)
    step, reciprocal, low, high, _ = _grid_of(scale_ptr, zero_point_ptr, 0, True, qmin, qmax)
    row = ((tile // inner_tiles) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = ((tile % inner_tiles).to(tl.int64) * INNER + tl.arange(0, INNER))[None, :]
    mask = (row < num_rows) & (column < inner)
    x = tl.load(x_ptr + (row * PARTS + part) * inner + column, mask=mask, other=0.0).to(tl.float32)
    y = _quantized(x, step, reciprocal, low, high)
    tl.store(y_ptr + row * inner + column, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def backward_stacked(
    grad0_ptr, grad1_ptr, grad2_ptr, x_ptr,
    scale0_ptr, scale1_ptr, scale2_ptr, zero_point0_ptr, zero_point1_ptr, zero_point2_ptr,
    grad_x_ptr, by_scale_ptr, by_zero_point_ptr,
    qmin, qmax, factor, num_rows, inner, inner_tiles, num_tiles, num_splits,
    NEEDS_X: tl.constexpr, NEEDS_SCALE: tl.constexpr, NEEDS_ZERO_POINT: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program has one kind of piece, and every `num_splits`-th of its tiles."""
    part, split = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS
    grad_ptr = _one_of(part, grad0_ptr, grad1_ptr, grad2_ptr)
    scale_ptr = _one_of(part, scale0_ptr, scale1_ptr, scale2_ptr)
    zero_point_ptr = _one_of(part, zero_point0_ptr, zero_point1_ptr, zero_point2_ptr)
    step, reciprocal, low, high, sign = _grid_of(scale_ptr, zero_point_ptr, 0, True, qmin, qmax)
    factor = tl.cast(factor, tl.float32)
    by_scale = tl.zeros((ROWS, INNER), tl.float32)
    outside = tl.zeros((ROWS, INNER), tl.float32)
    for tile in tl.range(split, num_tiles, num_splits, num_stages=STAGES):
        row = ((tile // inner_tiles) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        column = ((tile % inner_tiles).to(tl.int64) * INNER + tl.arange(0, INNER))[None, :]
        mask = (row < num_rows) & (column < inner)
        place = (row * PARTS + part) * inner + column
        x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + row * inner + column, mask=mask, other=0.0).to(tl.float32)
        grad_x, more_by_scale, more_outside = _gradients(
            grad, x, step, reciprocal, low, high, False, False, NEEDS_SCALE
        )
        if NEEDS_X:
            tl.store(grad_x_ptr + place, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
        if NEEDS_SCALE:
            by_scale += more_by_scale
        if NEEDS_ZERO_POINT:
            outside += more_outside
    place = part * num_splits + split
    if NEEDS_SCALE:
        tl.store(by_scale_ptr + place, tl.sum(tl.sum(by_scale, axis=1), axis=0) * (sign * factor))
    if NEEDS_ZERO_POINT:
        tl.store(by_zero_point_ptr + place, tl.sum(tl.sum(outside, axis=1), axis=0) * (step * factor))


@triton.jit
def forward_ragged(
    x_ptr, scale_ptr, start_ptr, qmin_ptr, qmax_ptr, y_ptr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of different lengths, one after the other, each with its own scale and grid; a program has one."""
    row = tl.program_id(0)
    start, end = tl.load(start_ptr + row), tl.load(start_ptr + row + 1)
    low, high = tl.load(qmin_ptr + row), tl.load(qmax_ptr + row)
    step = tl.maximum(tl.abs(tl.load(scale_ptr + row)), _SMALLEST, propagate_nan=tl.PropagateNan.ALL)
    reciprocal = tl.div_rn(1.0, step)
    for first in range(start, end, BLOCK):
        offset = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offset, mask=offset < end, other=0.0)
        y = _quantized(x, step, reciprocal, low, high)
        tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=offset < end)


@triton.jit
def backward_ragged(
    grad_ptr, x_ptr, scale_ptr, start_ptr, qmin_ptr, qmax_ptr, factor_ptr, grad_x_ptr, grad_scale_ptr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    start, end = tl.load(start_ptr + row), tl.load(start_ptr + row + 1)
    low, high = tl.load(qmin_ptr + row), tl.load(qmax_ptr + row)
    scale = tl.load(scale_ptr + row)
    step = tl.maximum(tl.abs(scale), _SMALLEST, propagate_nan=tl.PropagateNan.ALL)
    reciprocal = tl.div_rn(1.0, step)
    by_scale = tl.zeros((BLOCK,), tl.float32)
    for first in range(start, end, BLOCK):
        offset = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offset, mask=offset < end, other=0.0)
        grad = tl.load(grad_ptr + offset, mask=offset < end, other=0.0).to(tl.float32)
        grad_x, more_by_scale, _ = _gradients(grad, x, step, reciprocal, low, high, False, False, True)
        tl.store(grad_x_ptr + offset, grad_x, mask=offset < end)
        by_scale += more_by_scale
    sign = tl.where(scale < 0, -1.0, tl.where(scale > 0, 1.0, 0.0))
    tl.store(grad_scale_ptr + row, tl.sum(by_scale, axis=0) * (sign * tl.load(factor_ptr + row)))
