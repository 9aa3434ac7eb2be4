"""The windows of convolutions and pools: strides, dilations and padding."""

from __future__ import annotations

import math

import torch.nn.functional as F

from sparsebit.deploy.loading.building.call import Call
from sparsebit.deploy.loading.building.values import Value, example_of


def window(call: Call, kernel: list[int]) -> tuple[tuple[int, ...], tuple[int, ...], list[int]]:
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
    for size, k, stride, dilation in zip(example_of(call.inputs[0]).shape[2:], kernel, strides, dilations, strict=True):
        total = max((math.ceil(size / stride) - 1) * stride + (k - 1) * dilation + 1 - size, 0)
        small, large = total // 2, total - total // 2
        before.append(small if mode == "SAME_UPPER" else large)
        after.append(large if mode == "SAME_UPPER" else small)
    return strides, dilations, before + after


def padded(call: Call, value: Value, pads: list[int], fill: float = 0.0) -> tuple[Value, tuple[int, ...]]:
    """The input and the symmetric padding of its layer; other padding becomes a node before it."""
    dims = len(pads) // 2
    if pads[:dims] == pads[dims:]:
        return value, tuple(pads[:dims])
    pairs = [pad for axis in reversed(range(dims)) for pad in (pads[axis], pads[axis + dims])]
    return call.emit(F.pad, value, pairs, value=fill), (0,) * dims
