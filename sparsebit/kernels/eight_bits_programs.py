"""The Triton programs of `eight_bits`. Quotients are correctly rounded, as in plain torch on a CPU."""

from __future__ import annotations

import triton
import triton.language as tl

# Adding and subtracting 1.5 * 2^23 rounds a float32 below 2^22 to the nearest whole number, half to even.
_ROUND = tl.constexpr(12582912.0)
_LARGEST = tl.constexpr(3.4028234663852886e38)
_SMALLEST = tl.constexpr(1.1920928955078125e-07)  # instead of a scale of 0


@triton.jit
def round_row(
    x_ptr, codes_ptr, scale_ptr, width, half, constant,
    IS_CONSTANT: tl.constexpr, IS_INTEGER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: its largest number, then its codes."""
    row = tl.program_id(0).to(tl.int64)
    half, constant = tl.cast(half, tl.float32), tl.cast(constant, tl.float32)
    if IS_CONSTANT:
        scale = constant
    else:
        largest = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * width + at, mask=at < width, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.where(tl.abs(x) <= _LARGEST, tl.abs(x), 0.0))
        scale = tl.div_rn(tl.max(largest, 0), half)
        scale = tl.where(scale == 0, _SMALLEST, scale)
    wrong = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * width + at, mask=at < width, other=0.0).to(tl.float32)
        is_wrong = (x != x) | (tl.abs(x) > _LARGEST)
        wrong = tl.maximum(wrong, tl.where(is_wrong, 1.0, 0.0))
        x = tl.where(is_wrong, 0.0, x)
        code = tl.div_rn(x, scale + tl.zeros((BLOCK,), tl.float32))
        if IS_INTEGER:
            code = tl.minimum(tl.maximum(code, -200.0), 200.0)  # far below 2^22
            code = (code + _ROUND) - _ROUND
            code = tl.minimum(tl.maximum(code, -128.0), 127.0)
        else:
            code = tl.minimum(tl.maximum(code, -half), half)
        tl.store(codes_ptr + row * width + at, code.to(codes_ptr.dtype.element_ty), mask=at < width)
    # Codes have no NaN: it shows in the scale.
    tl.store(scale_ptr + row, tl.where(tl.max(wrong, 0) > 0, float("nan"), scale))


@triton.jit
def scale_row(sums_ptr, rows_ptr, columns_ptr, output_ptr, width, stride, BLOCK: tl.constexpr):
    """A part of a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.load(sums_ptr + row * stride + at, mask=at < width, other=0).to(tl.float32)
    by_column = tl.load(columns_ptr + at, mask=at < width, other=0.0)
    found = sums * tl.load(rows_ptr + row) * by_column
    tl.store(output_ptr + row * width + at, found.to(output_ptr.dtype.element_ty), mask=at < width)
