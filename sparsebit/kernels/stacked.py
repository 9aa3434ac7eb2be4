"""Fake-quant of two or three tensors that are stacked in one, each with its own scale: one pass in each direction."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from sparsebit.kernels.fake_quant import Cut, Launch, ceil_div, factors, num_splits
from sparsebit.kernels.fake_quant_programs import backward_stacked, forward_stacked

MOST_PARTS = 3
FORWARD = Cut(2048, 4)
BACKWARD = Cut(2048, 4, 1 << 12, stages=3)


def forward_launch(num_parts: int, num_rows: int, inner: int) -> Launch:
    rows, width, inner_tiles = _tiled(FORWARD, inner)
    num_tiles = ceil_div(num_rows, rows) * inner_tiles
    sizes = (num_rows, inner, inner_tiles)
    return Launch(forward_stacked, num_tiles * num_parts, sizes, (num_parts, rows, width), FORWARD.warps)


def backward_launch(num_parts: int, num_rows: int, inner: int) -> tuple[Launch, int]:
    """The launch, and the number of sums for each part."""
    rows, width, inner_tiles = _tiled(BACKWARD, inner)
    num_tiles = ceil_div(num_rows, rows) * inner_tiles
    splits = num_splits(num_tiles, num_parts, BACKWARD)
    sizes = (num_rows, inner, inner_tiles, num_tiles, splits)
    constants = (num_parts, rows, width, BACKWARD.stages)
    return Launch(backward_stacked, splits * num_parts, sizes, constants, BACKWARD.warps), splits


# Not cached for a compiler, whose sizes may be symbols, which cannot be hashed.
_known_forward = lru_cache(maxsize=1024)(forward_launch)
_known_backward = lru_cache(maxsize=1024)(backward_launch)


def _tiled(cut: Cut, inner: int) -> tuple[int, int, int]:
    """Rows and columns of a tile, and the number of tiles across."""
    width = min(triton.next_power_of_2(inner), cut.tile)
    return cut.tile // width, width, ceil_div(inner, width)


def forward(
    x: Tensor,
    pieces: Sequence[Tensor],
    form: tuple[int, int],
    scales: Sequence[Tensor],
    zero_points: Sequence[Tensor],
    qmin: int,
    qmax: int,
    *,
    in_graph: bool = False,
) -> list[Tensor]:
    """`pieces`: those of `x`, whose rows (`form[0]`) consist of them, `form[1]` elements each."""
    ys = [torch.empty_like(piece) for piece in pieces]
    launch = (forward_launch if in_graph else _known_forward)(len(ys), *form)
    tensors = (x, *_three(ys), *_three(scales), *_three(zero_points))
    (launch.in_graph if in_graph else launch)(tensors, (float(qmin), float(qmax)))
    return ys


def backward(
    grads: Sequence[Tensor],
    x: Tensor,
    pieces: Sequence[Tensor],
    form: tuple[int, int],
    scales: Sequence[Tensor],
    zero_points: Sequence[Tensor],
    *rest: Any,
    in_graph: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradient of x, and the sums of the gradients of all scales and of all zero points: a row for each part.

    `rest`: qmin, qmax, and whether x, scales and zero points need gradients.
    """
    qmin, qmax, needs = rest
    dense = [_like(grad, piece) for grad, piece in zip(grads, pieces, strict=True)]
    launch, splits = (backward_launch if in_graph else _known_backward)(len(dense), *form)
    grad_x = torch.empty_like(x) if needs[0] else None
    sums = [x.new_empty((len(dense), splits), dtype=torch.float32) if needed else None for needed in needs[1:]]
    outputs = [x if tensor is None else tensor for tensor in (grad_x, *sums)]
    tensors = (*_three(dense), x, *_three(scales), *_three(zero_points), *outputs)
    inside, outside = factors(form[0] * form[1], qmax)
    numbers = (float(qmin), float(qmax), inside)
    (launch.in_graph if in_graph else launch)(tensors, numbers, needs)
    by_scale, by_zero_point = (found if found is None or outside is None else found * outside for found in sums)
    return grad_x, by_scale, by_zero_point


def _like(grad: Tensor, piece: Tensor) -> Tensor:
    """A dense tensor in the memory order of `piece`."""
    expected = 1
    steps = grad.stride()
    for _, dim in sorted((step, dim) for dim, step in enumerate(piece.stride())):
        if steps[dim] != expected:
            return torch.empty_like(piece, dtype=grad.dtype).copy_(grad)
        expected = expected * grad.shape[dim]
    return grad


def _three(tensors: Sequence[Any]) -> tuple[Any, ...]:
    """Three tensors; if there are fewer, the last one is repeated."""
    return (*tensors, *[tensors[-1]] * (MOST_PARTS - len(tensors)))
