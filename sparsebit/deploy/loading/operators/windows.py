"""The windows of convolutions and pools: strides, dilations and padding."""

from __future__ import annotations

import operator as python

import torch
import torch.nn.functional as F
from torch import fx

from sparsebit.deploy.loading.building.call import Call
from sparsebit.deploy.loading.building.values import Number, Value


def window(call: Call, kernel: list[int]) -> tuple[tuple[int, ...], tuple[int, ...], list[Number]]:
    """Strides, dilations, and pads as ONNX has them: those before each axis, then those after."""
    dims = len(kernel)
    strides = tuple(call.attribute("strides", [1] * dims))
    dilations = tuple(call.attribute("dilations", [1] * dims))
    mode = call.attribute("auto_pad", "NOTSET")
    if mode == "VALID":
        return strides, dilations, [0] * 2 * dims
    if mode == "NOTSET":
        return strides, dilations, list(call.attribute("pads", [0] * 2 * dims))
    before, after = [], []
    for axis, (k, stride, dilation) in enumerate(zip(kernel, strides, dilations, strict=True), 2):
        total = _total(call, axis, (k - 1) * dilation + 1, stride)
        small = call.number(python.floordiv, total, 2)
        large = call.number(python.sub, total, small)
        before.append(small if mode == "SAME_UPPER" else large)
        after.append(large if mode == "SAME_UPPER" else small)
    return strides, dilations, before + after


def _total(call: Call, axis: int, extent: int, stride: int) -> Number:
    """The padding of both ends with which ceil(size / stride) windows fit; nodes if the file leaves the size open."""
    if stride == 1:
        return extent - 1
    size = call.size(axis)
    rest = call.number(python.mod, size, stride)  # the last window begins `rest` or a stride before the end
    if not isinstance(rest, fx.Proxy):
        return max(extent - (rest or stride), 0)
    begin = call.number(python.add, call.number(python.mod, call.number(python.sub, size, 1), stride), 1)
    return call.number(torch.sym_max, call.number(python.sub, extent, begin), 0)


def padded(call: Call, value: Value, pads: list[Number], fill: float = 0.0) -> tuple[Value, tuple[int, ...]]:
    """The input and the symmetric padding of its layer; other padding becomes a node before it."""
    dims = len(pads) // 2
    if not any(isinstance(pad, fx.Proxy) for pad in pads) and pads[:dims] == pads[dims:] and min(pads, default=0) >= 0:
        return value, tuple(pads[:dims])
    return padded_apart(call, value, pads, fill), (0,) * dims


def padded_apart(call: Call, value: Value, pads: list[Number], fill: float) -> Value:
    """The input padded by a node of its own."""
    dims = len(pads) // 2
    pairs = [pad for axis in reversed(range(dims)) for pad in (pads[axis], pads[axis + dims])]
    return call.emit(F.pad, value, pairs, value=fill)
