"""Fake-quant in few passes over memory, for devices without kernels: equal to `reference`, bit by bit.

Passes are elementwise and in place, because memory traffic is the cost. A scale stays a tensor even when it is one
number, for two reasons: torch needs longer to wrap a Python number (5 us) than to run a small kernel, and on a GPU it
would multiply by the number's reciprocal, which rounds differently from a division.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from sparsebit.numerics.qparams import SMALLEST_SCALE, check_num_params
from sparsebit.numerics.reference import compute_dtype
from sparsebit.numerics.spec import PerChannel, PerGroup, PerTensor, axis_in, pad_groups


def fake_quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor, axis: int | None, group_size: int, qmin: int, qmax: int
) -> Tensor:
    """`reference.fake_quantize` into one new tensor (two if half precision computes in float32), strides kept."""
    if axis is not None and group_size and x.shape[axis] % group_size:
        y = fake_quantize(pad_groups(x, axis, group_size), scale, zero_point, axis, group_size, qmin, qmax)
        return torch.empty_like(x).copy_(y.narrow(axis, 0, x.shape[axis]))
    scale = magnitude(align(scale, x, axis, group_size))
    codes = divide(x, scale, axis, group_size).round_()
    blocks = as_blocks(codes, axis, group_size)
    low, high, shift = grid(align(zero_point, x, axis, group_size), qmin, qmax)
    if shift is None:
        blocks.clamp_(low, high)
    else:
        blocks.add_(shift).clamp_(low, high).sub_(shift)
    blocks.mul_(scale)
    return codes if codes.dtype == x.dtype else codes.to(x.dtype)


def codes_of(
    x: Tensor, scale: Tensor, zero_point: Tensor, axis: int | None, group: int, qmin: int, qmax: int
) -> Tensor:
    """The integers that the fake-quant rounds `x` to: the same float32 steps, kept as int64."""
    if axis is not None and group and x.shape[axis] % group:
        padded = codes_of(pad_groups(x, axis, group), scale, zero_point, axis, group, qmin, qmax)
        return padded.narrow(axis, 0, x.shape[axis])
    blocks = as_blocks(x.float(), axis, group)
    scale, zero_point = (p.reshape(aligned_shape(tuple(x.shape), axis, group, p.numel())) for p in (scale, zero_point))
    codes = (blocks / scale).round_().nan_to_num_(0).double() + zero_point
    return codes.clamp_(qmin, qmax).to(torch.int64).reshape(x.shape)


def as_blocks(x: Tensor, axis: int | None, group_size: int) -> Tensor:
    """A view in which parameters broadcast: groups get a separate dimension, `(8, 256)` -> `(8, 2, 128)`."""
    return x if axis is None or not group_size else torch.unflatten(x, axis, (-1, group_size))


def align(param: Tensor, x: Tensor, axis: int | None, group_size: int) -> Tensor:
    """`param` in the type of the arithmetic on `x`, shaped to match its blocks: `()`, `(1, C, 1, 1)`, `(8, 2, 1)`."""
    dtype = compute_dtype(x.dtype)
    if param.dtype != dtype:
        param = param.to(dtype)
    if param.is_cpu != x.is_cpu:
        param = param.to(x.device)
    if param.ndim == 0:
        return param
    return param.reshape(aligned_shape(x.shape, axis, group_size, param.numel()))


def magnitude(scale: Tensor) -> Tensor:
    """The step of a scale, its absolute value: a learned scale may become negative for a while."""
    return scale.abs().clamp_min_(SMALLEST_SCALE)


def divide(x: Tensor, scale: Tensor, axis: int | None, group_size: int) -> Tensor:
    """`x / scale` as a new tensor of the shape and memory order of `x`, in the type of `scale`."""
    if x.dtype != scale.dtype:
        quotient = x.to(scale.dtype)
        as_blocks(quotient, axis, group_size).div_(scale)
    elif not group_size:
        quotient = x.div(scale)
    else:
        quotient = torch.empty_like(x)
        torch.div(as_blocks(x, axis, group_size), scale, out=as_blocks(quotient, axis, group_size))
    return quotient


def grid(zero_point: Tensor, qmin: int, qmax: int) -> tuple[int, int, Tensor | None]:
    """(low, high, shift): `clamp(codes + shift, low, high)`, without a shift if the ends can absorb it.

    That saves two passes over memory. It requires reading the zero point: free on a CPU, a stall on a GPU.
    """
    if zero_point.is_cpu:
        if zero_point.ndim == 0:
            value = zero_point.item()
            if math.isfinite(value):
                return qmin - round(value), qmax - round(value), None
        elif not zero_point.any():
            return qmin, qmax, None
    return qmin, qmax, zero_point.round()


def aligned_shape(shape: tuple[int, ...], axis: int | None, group_size: int, num_params: int) -> tuple[int, ...]:
    """The shape in which parameters match the blocks of a tensor of this shape: each dimension inside a row is 1."""
    if torch.compiler.is_compiling():  # compilers cannot trace caches
        return _aligned_shape(shape, axis, group_size, num_params)
    try:
        return _known_aligned_shape(shape, axis, group_size, num_params)
    except TypeError:  # a compiler's sizes may be symbols, which cannot be hashed
        return _aligned_shape(shape, axis, group_size, num_params)


def _aligned_shape(shape: tuple[int, ...], axis: int | None, group_size: int, num_params: int) -> tuple[int, ...]:
    if num_params == 1:
        return ()
    granularity = PerTensor() if axis is None else PerGroup(axis, group_size) if group_size else PerChannel(axis)
    check_num_params(num_params, shape, granularity)
    assert granularity.axis is not None, "a tensor of one row has one parameter"
    axis = axis_in(granularity, len(shape))
    if not group_size:
        return tuple(size if dim == axis else 1 for dim, size in enumerate(shape))
    return (*shape[:axis], shape[axis] // group_size, 1, *shape[axis + 1 :])


_known_aligned_shape = lru_cache(maxsize=4096)(_aligned_shape)
