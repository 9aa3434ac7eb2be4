"""Fake-quant on a GPU: one pass over memory forward, one backward. Equal to `plain`, bit by bit but for sums.

A dense tensor is seen in the order of its memory, as one of two matrices of tiles, whatever its dimensions are called:

    rows      (rows, inner), one parameter per row, `row % num_params`: per tensor (1 row), per channel with something
              behind the channel in memory, per group (as many rows as groups)
    columns   (rows, num_params), one parameter per column: channels-last activations

Gradients of scale and zero point are summed in two stages, by programs that walk over many tiles and then over the
programs, in a fixed order: runs repeat bit by bit. What has gaps in memory is copied first. What a tile cannot be
(float64, groups along a slow axis, 32-bit codes) is `PLAIN`'s.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, ClassVar

import torch
import triton
from torch import Tensor

from sparsebit.numerics.gradients import lsq_factor
from sparsebit.numerics.operator import PLAIN, Kernels
from sparsebit.numerics.qparams import check_num_params
from sparsebit.numerics.spec import PerChannel, PerGroup
from sparsebit.numerics.triton_programs import (
    IS_INTERPRETED,
    LARGEST_CODE,
    backward_columns,
    backward_rows,
    forward_columns,
    forward_rows,
)

# Elements of a tile, warps of a program, and programs that share a reduction; by a sweep on an H200
# (benchmarks/fake_quant.py).
FORWARD_TILE, BACKWARD_TILE, NUM_WARPS, NUM_PROGRAMS = 2048, 2048, 4, 132 * 16
NUM_STAGES = 2  # tiles that a program has in flight
COLUMNS_OF_TILE = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Launch:
    """A kernel with its grid and sizes.

    The kernel that the first call compiled is called directly afterwards: triton's way of finding it again takes ten
    times as long as starting it, and a network starts hundreds.
    """

    def __init__(self, kernel: Any, grid: int, sizes: tuple[int, ...], constants: tuple[int, ...]) -> None:
        self.kernel, self.grid, self.sizes, self.constants = kernel, grid, sizes, constants
        self.compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(self, tensors: tuple[Tensor, ...], numbers: tuple[float, ...], flags: tuple[bool, ...] = ()) -> None:
        arguments = (*tensors, *numbers, *self.sizes, *flags, *self.constants)
        device = tensors[0].get_device()
        # Compiled for aligned memory; a view may begin anywhere.
        is_aligned = not any(tensor.data_ptr() & 15 for tensor in tensors)
        key = (flags, device, *[tensor.dtype for tensor in tensors])
        compiled = self.compiled.get(key) if is_aligned else None
        if compiled is None:
            compiled = self.kernel[(self.grid,)](*arguments, num_warps=NUM_WARPS)
            if is_aligned and not IS_INTERPRETED:
                self.compiled[key] = compiled
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        compiled.run(self.grid, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)


class Tiles:
    """One form of tensor, cut for both kernels; and how the programs' sums become parameters."""

    def __init__(self, outer: int, inner: int, num_params: int) -> None:
        """`inner` 1 with several parameters: columns."""
        self.by_columns = inner == 1 and num_params > 1
        self.num_params = num_params
        if self.by_columns:
            columns = min(triton.next_power_of_2(num_params), COLUMNS_OF_TILE)
            column_tiles = triton.cdiv(num_params, columns)
            rows = FORWARD_TILE // columns
            grid = triton.cdiv(outer, rows) * column_tiles
            self.forward = Launch(forward_columns, grid, (outer, num_params, column_tiles), (rows, columns))
            rows = BACKWARD_TILE // columns
            row_tiles = triton.cdiv(outer, rows)
            splits = _splits(row_tiles, column_tiles)
            self.backward = Launch(
                backward_columns,
                splits * column_tiles,
                (outer, num_params, column_tiles, row_tiles, splits),
                (rows, columns, NUM_STAGES),
            )
            self.sums_shape, self.summed = (splits, num_params), 0
            return
        num_rows = outer * num_params
        width = min(triton.next_power_of_2(inner), FORWARD_TILE)
        rows = min(FORWARD_TILE // width, triton.next_power_of_2(num_rows))
        inner_tiles = triton.cdiv(inner, width)
        grid = triton.cdiv(num_rows, rows) * inner_tiles
        self.forward = Launch(forward_rows, grid, (num_rows, inner, num_params, inner_tiles), (rows, width))
        width = min(triton.next_power_of_2(inner), BACKWARD_TILE)
        rows = min(BACKWARD_TILE // width, triton.next_power_of_2(outer))
        inner_tiles = triton.cdiv(inner, width)
        num_tiles = triton.cdiv(outer, rows) * inner_tiles
        splits = _splits(num_tiles, num_params)
        sizes = (outer, inner, num_params, inner_tiles, num_tiles, splits)
        is_one = num_params == 1
        constants = (rows, width, NUM_STAGES, triton.next_power_of_2(splits) if is_one else 0)
        self.backward = Launch(backward_rows, splits * num_params, sizes, constants)
        self.sums_shape, self.summed = (num_params, splits), 1


def _splits(num_tiles: int, num_groups: int) -> int:
    """Programs for each of `num_groups` reductions over `num_tiles`."""
    return max(1, min(num_tiles, NUM_PROGRAMS // num_groups))


@lru_cache(maxsize=4096)
def _tiles(
    shape: tuple[int, ...], stride: tuple[int, ...], axis: int | None, group_size: int, num_params: int
) -> Tiles | None:
    """None where a dense tensor has no such form."""
    num_elements = prod(shape)
    if num_elements == 0:
        return None
    if num_params == 1:
        return Tiles(1, num_elements, 1)
    if axis is None:
        return None
    check_num_params(num_params, shape, PerGroup(axis, group_size) if group_size else PerChannel(axis))
    axis %= len(shape)
    if group_size:
        is_fastest = axis == len(shape) - 1 and _is_contiguous(shape, stride)
        if not is_fastest or shape[axis] % group_size:
            return None
        return Tiles(1, group_size, num_params)
    return Tiles(num_elements // num_params // stride[axis], stride[axis], num_params)


@lru_cache(maxsize=4096)
def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def _is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for step, size in zip(reversed(stride), reversed(shape), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def _dense(x: Tensor) -> Tensor:
    return x if _is_dense(x.shape, x.stride()) else torch.empty_like(x).copy_(x)


def _plan(
    x: Tensor, scale: Tensor, zero_point: Tensor, axis: int | None, group_size: int, qmin: int, qmax: int
) -> Tiles | None:
    if x.dtype not in DTYPES or qmax > LARGEST_CODE or -qmin > LARGEST_CODE:
        return None
    if scale.device != x.device or zero_point.device != x.device or zero_point.numel() != scale.numel():
        return None
    return _tiles(x.shape, x.stride(), axis, group_size, scale.numel())


def fake_quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor, axis: int | None, group_size: int, qmin: int, qmax: int
) -> Tensor:
    """As `plain.fake_quantize`."""
    x = _dense(x)
    tiles = _plan(x, scale, zero_point, axis, group_size, qmin, qmax)
    if tiles is None:
        return PLAIN.forward(x, scale, zero_point, axis, group_size, qmin, qmax)
    y = torch.empty_like(x)
    tiles.forward((x, scale, zero_point, y), (float(qmin), float(qmax)))
    return y


def backward(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    axis: int | None,
    group_size: int,
    qmin: int,
    qmax: int,
    gradient: str,
    needs_x: bool,
    needs_scale: bool,
    needs_zero_point: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """As `gradients.backward`."""
    needs = (needs_x, needs_scale, needs_zero_point)
    x = _dense(x)
    tiles = _plan(x, scale, zero_point, axis, group_size, qmin, qmax)
    if tiles is None:
        return PLAIN.backward(grad, x, scale, zero_point, axis, group_size, qmin, qmax, gradient, *needs)
    if grad.stride() != x.stride():
        grad = torch.empty_like(x, dtype=grad.dtype).copy_(grad)
    grad_x = torch.empty_like(x) if needs_x else None
    numbers = (float(qmin), float(qmax), 1.0 if gradient == "pact" else lsq_factor(x.numel(), scale.numel(), qmax))
    flags = (gradient == "pact", *needs)
    num_learned = needs_scale + needs_zero_point
    inputs = (grad, x, scale, zero_point, x if grad_x is None else grad_x)
    if tiles.by_columns:
        totals = x.new_empty((num_learned, *tiles.sums_shape), dtype=torch.float32)
        tiles.backward((*inputs, totals), numbers, flags)
        totals = totals.sum(1) if num_learned else totals
    elif tiles.num_params == 1:
        scratch = _Scratch.of(x)
        totals = x.new_empty(num_learned, dtype=torch.float32)
        tiles.backward((*inputs, scratch.sums, totals, scratch.counter), numbers, flags)
    else:
        totals = x.new_empty((num_learned, *tiles.sums_shape), dtype=torch.float32)
        tiles.backward((*inputs, totals, totals, totals), numbers, flags)
        totals = totals.sum(2) if tiles.sums_shape[1] > 1 and num_learned else totals
    grad_scale = totals[0].reshape(scale.shape).to(scale.dtype) if needs_scale else None
    grad_zero_point = totals[-1].reshape(zero_point.shape).to(zero_point.dtype) if needs_zero_point else None
    return grad_x, grad_scale, grad_zero_point


class _Scratch:
    """Memory of one stream for sums on their way. Its kernels run one after the other, so that they share it."""

    _known: ClassVar[dict[tuple[int, int], _Scratch]] = {}

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.empty(2 * NUM_PROGRAMS, device=device)
        self.counter = torch.zeros(1, dtype=torch.int32, device=device)

    @classmethod
    def of(cls, x: Tensor) -> _Scratch:
        device = x.get_device()
        key = (device, torch._C._cuda_getCurrentRawStream(device) if x.is_cuda else 0)
        if key not in cls._known:
            cls._known[key] = cls(x.device)
        return cls._known[key]


KERNELS = Kernels(fake_quantize, backward)
