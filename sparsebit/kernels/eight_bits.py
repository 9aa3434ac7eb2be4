"""Inputs rounded to codes of 8 bits, and sums of products of codes scaled back, each in one pass over memory on a GPU.

In plain torch, rounding takes a dozen passes over the input, more time than the product of the codes itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsebit.kernels.token_attention import has_triton

_WIDEST = 1 << 16  # columns
_BLOCK = 1024


def takes(x: Tensor) -> bool:
    """Whether the kernels support these inputs, `(rows, columns)`."""
    is_known = x.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return x.is_cuda and not torch.version.hip and is_known and has_triton() and x.shape[1] <= _WIDEST


def round_rows(x: Tensor, half: float, constant: float | None) -> tuple[Tensor, Tensor]:
    """The codes of `x (rows, columns)` and the scale of each row, `(rows, 1)`.

    `half`: 127.5 for int8, 448 for float8; a row's scale is its largest number divided by it, or `constant`.
    """
    codes, scale = torch.ops.sparsebit.round_rows(x, half, constant)
    return codes, scale


def scale_sums(sums: Tensor, rows: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """`sums * rows * columns`: sums `(rows, columns)` int32, scales of rows `(rows, 1)` and columns `(1, columns)`."""
    found: Tensor = torch.ops.sparsebit.scale_sums(sums, rows, columns, dtype)
    return found


@torch.library.custom_op("sparsebit::round_rows", mutates_args=())
def _round_rows(x: Tensor, half: float, constant: float | None) -> tuple[Tensor, Tensor]:
    with torch.cuda.device(x.device):
        return rounded(x, half, constant)


@_round_rows.register_fake
def _shapes(x: Tensor, half: float, constant: float | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=_code_type(half)), x.new_empty(len(x), 1, dtype=torch.float32)


@torch.library.custom_op("sparsebit::scale_sums", mutates_args=())
def _scale_sums(sums: Tensor, rows: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    with torch.cuda.device(sums.device):
        return scaled(sums, rows, columns, dtype)


@_scale_sums.register_fake
def _shape(sums: Tensor, rows: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(sums, dtype=dtype)


def rounded(x: Tensor, half: float, constant: float | None) -> tuple[Tensor, Tensor]:
    """Run the kernel of `round_rows`."""
    from triton import next_power_of_2

    from sparsebit.kernels.eight_bits_programs import round_row

    x = x.contiguous()
    codes, scale = _shapes(x, half, constant)
    block = min(_BLOCK * 4, next_power_of_2(x.shape[1]))
    if x.numel():
        round_row[(len(x),)](
            x, codes, scale, x.shape[1], half, 0.0 if constant is None else constant,
            IS_CONSTANT=constant is not None, IS_INTEGER=codes.dtype == torch.int8, BLOCK=block,
        )  # fmt: skip
    return codes, scale


def scaled(sums: Tensor, rows: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """Run the kernel of `scale_sums`."""
    from sparsebit.kernels.eight_bits_programs import scale_row

    found = torch.empty_like(sums, dtype=dtype)
    width = sums.shape[1]
    if sums.numel():
        grid = (len(sums), -(-width // _BLOCK))
        scale_row[grid](sums, rows, columns, found, width, sums.stride(0), BLOCK=_BLOCK)
    return found


def _code_type(half: float) -> torch.dtype:
    return torch.int8 if half < 128 else torch.float8_e4m3fn
