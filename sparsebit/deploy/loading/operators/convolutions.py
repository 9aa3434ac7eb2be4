"""Convolutions and transposed convolutions: layers where the weight is constant."""

from __future__ import annotations

import operator as python
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from sparsebit.deploy.loading.building.call import Call
from sparsebit.deploy.loading.building.operator_table import operator
from sparsebit.deploy.loading.building.values import Value, example_of, is_constant
from sparsebit.deploy.loading.operators.windows import padded, window

_CONVS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}

_TRANSPOSED: dict[int, Any] = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}

_CONV_FUNCTIONS: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@operator("Conv")
def _conv(call: Call) -> Value:
    value, weight, bias = call.inputs[0], call.inputs[1], call.input(2)
    kernel = list(example_of(weight).shape[2:])
    if len(kernel) not in _CONVS:
        raise call.refusal(f"a convolution over {len(kernel)} axes; torch has those over 1 to 3")
    strides, dilations, pads = window(call, kernel)
    value, padding = padded(call, value, pads)
    groups = call.attribute("group", 1)
    if not is_constant(weight) or not (bias is None or is_constant(bias)):
        return call.emit(_CONV_FUNCTIONS[len(kernel)], value, weight, bias, strides, padding, dilations, groups)
    settings = (tuple(kernel), strides, padding, dilations, groups)
    channels = weight.shape[1] * groups, weight.shape[0]
    layer = _CONVS[len(kernel)](*channels, *settings, bias is not None, device="meta")
    return call.layer(layer, settings, {"weight": weight, "bias": bias}, value)


@operator("FusedConv", domain="com.microsoft")
def _fused_conv(call: Call) -> Value:
    found = _conv(call)
    if call.input(3) is not None:
        found = call.emit(torch.add, found, call.inputs[3])
    name = call.attribute("activation", "")
    functions: dict[str, Any] = {"": None, "Relu": torch.relu, "Sigmoid": torch.sigmoid, "Tanh": torch.tanh}
    if name not in functions:
        raise call.refusal(f"its activation {name}; allowed: Relu, Sigmoid, Tanh")
    return found if functions[name] is None else call.emit(functions[name], found)


@operator("ConvTranspose")
def _conv_transpose(call: Call) -> Value:
    value, weight, bias = call.inputs[0], call.constant(1, "weight"), call.input(2)
    kernel = list(weight.shape[2:])
    dims = len(kernel)
    if dims not in _TRANSPOSED:
        raise call.refusal(f"a transposed convolution over {dims} axes; torch has those over 1 to 3")
    strides = tuple(call.attribute("strides", [1] * dims))
    dilations = tuple(call.attribute("dilations", [1] * dims))
    extra = list(call.attribute("output_padding", [0] * dims))
    pads = list(call.attribute("pads", [0] * 2 * dims))
    wanted, mode = call.attribute("output_shape"), call.attribute("auto_pad", "NOTSET")
    if wanted is not None or mode in ("SAME_UPPER", "SAME_LOWER"):
        sizes = example_of(value).shape[2:]
        wanted = (
            [size * stride for size, stride in zip(sizes, strides, strict=True)] if wanted is None else wanted[-dims:]
        )
        full = [
            (size - 1) * s + e + (k - 1) * d + 1
            for size, s, e, k, d in zip(sizes, strides, extra, kernel, dilations, strict=True)
        ]
        total = [max(a - b, 0) for a, b in zip(full, wanted, strict=True)]
        extra = [e + max(b - a, 0) for e, a, b in zip(extra, full, wanted, strict=True)]
        halves = [t // 2 for t in total]
        others = [t - t // 2 for t in total]
        pads = halves + others if mode == "SAME_UPPER" else others + halves
    padding, cut = _symmetric(pads, extra, [max(pair) for pair in zip(strides, dilations, strict=True)])
    groups = call.attribute("group", 1)
    settings = (tuple(kernel), strides, tuple(padding), tuple(extra), groups)
    if any(e >= max(s, d) for e, s, d in zip(extra, strides, dilations, strict=True)):
        raise call.refusal(f"its output padding {extra} is not smaller than its stride; torch has no such layer")
    channels = weight.shape[0], weight.shape[1] * groups
    layer = _TRANSPOSED[dims](*channels, *settings, bias is not None, dilations, device="meta")
    found = call.layer(layer, (*settings, dilations), {"weight": weight, "bias": bias}, value)
    if not any(map(any, cut)):
        return found
    pieces = [slice(before, -after if after else None) for before, after in cut]
    return call.emit(python.getitem, found, (slice(None), slice(None), *pieces))


def _symmetric(pads: list[int], extra: list[int], limits: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """The symmetric padding, and what is left to cut off each end of an axis; changes the output padding `extra`.

    An end that is cut by less than the start is output padding, as far as torch allows; every other difference is cut.
    """
    padding, cut = [], []
    for axis, (before, after) in enumerate(zip(pads[: len(extra)], pads[len(extra) :], strict=True)):
        after -= extra[axis]
        if before - after < limits[axis]:
            extra[axis] = max(before - after, 0)
            padding.append(before)
            cut.append((0, max(after - before, 0)))
        else:
            extra[axis] = 0
            padding.append(max(after, 0))
            cut.append((before - max(after, 0), 0))
            extra[axis] = max(-after, 0)
    return padding, cut
