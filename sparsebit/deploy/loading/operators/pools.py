"""Pools over windows and over the whole image."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from sparsebit.deploy.loading.building.call import Call
from sparsebit.deploy.loading.building.operator_table import operator
from sparsebit.deploy.loading.building.values import Value
from sparsebit.deploy.loading.operators.windows import padded, padded_apart, window

_MAX_POOLS: dict[int, Any] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}

_AVERAGE_POOLS: dict[int, Any] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}

_ADAPTIVE: dict[str, dict[int, Any]] = {
    "GlobalAveragePool": {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d},
    "GlobalMaxPool": {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d},
}


@operator("MaxPool")
def _max_pool(call: Call) -> list[Value]:
    kernel = list(call.attribute("kernel_shape"))
    if len(kernel) not in _MAX_POOLS or (len(call.node.output) > 1 and call.node.output[1]):
        raise call.refusal("a pool over 1 to 3 axes without its indices is allowed")
    strides, dilations, pads = window(call, kernel)
    value, padding = padded(call, call.inputs[0], pads, -math.inf)
    if any(2 * pad > k for pad, k in zip(padding, kernel, strict=True)):  # more than torch allows
        value, padding = padded_apart(call, call.inputs[0], pads, -math.inf), (0,) * len(kernel)
    return [call.emit(_MAX_POOLS[len(kernel)], value, tuple(kernel), strides, padding, dilations, _is_ceil(call)), None]


def _is_ceil(call: Call) -> bool:
    """Whether windows that do not fit count; the pads of auto_pad make all of them fit."""
    return bool(call.attribute("ceil_mode", 0)) and not call.attribute("auto_pad", "").startswith("SAME")


@operator("AveragePool")
def _average_pool(call: Call) -> Value:
    kernel = list(call.attribute("kernel_shape"))
    strides, dilations, pads = window(call, kernel)
    if len(kernel) not in _AVERAGE_POOLS or any(one != 1 for one in dilations):
        raise call.refusal("an average pool over 1 to 3 axes without dilation is allowed")
    pool, counts_pads = _AVERAGE_POOLS[len(kernel)], bool(call.attribute("count_include_pad", 0))
    value, padding = padded(call, call.inputs[0], pads)
    settings = (tuple(kernel), strides, padding, _is_ceil(call), counts_pads)
    found = call.emit(pool, value, *settings)
    if value is call.inputs[0] or counts_pads:
        return found
    ones = call.emit(torch.ones_like, call.inputs[0])
    shares = call.emit(pool, padded(call, ones, pads)[0], *settings)
    return call.emit(torch.div, found, shares)


@operator("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(call: Call) -> Value:
    dims = call.rank() - 2
    if dims not in (1, 2, 3):
        raise call.refusal(f"a pool over {dims} axes; torch has those over 1 to 3")
    return call.emit(_ADAPTIVE[call.node.op_type][dims], call.inputs[0], 1 if dims == 1 else (1,) * dims)
