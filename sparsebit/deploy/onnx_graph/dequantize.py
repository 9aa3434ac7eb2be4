"""Converts stored integers to float arrays, as DequantizeLinear and MatMulNBits define it."""

from __future__ import annotations

from typing import Any

from sparsebit.deploy.onnx_graph.packages import numpy as np


def dequantize(values: Any, scale: Any, zero_point: Any = None, *, axis: int = 1, block: int = 0) -> Any:
    """`(values - zero_point) * scale` in float32.

    One scale for the tensor; one per index of `axis`; or, if `scale` has the rank of `values`, one per block of
    `block` elements along `axis` (the last block may be shorter).
    """
    integers, scales = values.astype(np.float32), scale.astype(np.float32)
    zeros = np.zeros_like(scales) if zero_point is None else zero_point.astype(np.float32)
    shape = integers.shape
    return (integers - _spread(zeros, shape, axis, block)) * _spread(scales, shape, axis, block)


def _spread(parameter: Any, shape: tuple[int, ...], axis: int, block: int) -> Any:
    """The parameter in a shape that broadcasts against `shape`."""
    if parameter.size == 1:
        return parameter.reshape(())
    axis %= len(shape)
    if parameter.ndim == 1 and not block:
        return parameter.reshape([-1 if position == axis else 1 for position in range(len(shape))])
    size = block or -(-shape[axis] // parameter.shape[axis])
    return np.take(np.repeat(parameter, size, axis=axis), range(shape[axis]), axis=axis)


def unpack_matmul_nbits(
    packed: Any, scale: Any, zero_point: Any, *, rows: int, columns: int, bits: int, block: int
) -> Any:
    """The float weight (columns, rows) = (K, N) of an ONNX Runtime MatMulNBits node.

    packed: (N, blocks, block * bits / 8) bytes, low bits first. scale: N * blocks numbers. zero_point: packed like the
    weight along the blocks, or floats, or None for the middle of the range.
    """
    num_blocks = -(-columns // block)
    values = _unpacked(packed.reshape(rows, num_blocks, -1), bits)[..., :block]
    if zero_point is None:
        zeros: Any = np.full((rows, num_blocks), 2 ** (bits - 1), np.float32)
    elif zero_point.dtype == np.uint8:
        zeros = _unpacked(zero_point.reshape(rows, -1), bits)[:, :num_blocks]
    else:
        zeros = zero_point.reshape(rows, num_blocks)
    centred = values.astype(np.float32) - zeros.astype(np.float32)[..., None]
    weight = centred * scale.reshape(rows, num_blocks, 1).astype(np.float32)
    return np.ascontiguousarray(weight.reshape(rows, -1)[:, :columns].T)


def _unpacked(packed: Any, bits: int) -> Any:
    """(..., bytes) -> (..., bytes * 8 / bits)."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    spread = (packed[..., None] >> shifts) & np.uint8(2**bits - 1)
    return spread.reshape(*packed.shape[:-1], -1)
