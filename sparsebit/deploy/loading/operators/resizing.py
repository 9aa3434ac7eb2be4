"""Resize: torch's own interpolation where it defines the same positions, else products with matrices of weights."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsebit.deploy.loading.building.call import Call
from sparsebit.deploy.loading.building.operator_table import operator
from sparsebit.deploy.loading.building.values import Number, Numbers, Value, example_of, items_of
from sparsebit.deploy.onnx_graph.packages import numpy

# The names of torch's modes, by the number of axes that are resized.
_MODES = {
    1: {"nearest": "nearest", "linear": "linear"},
    2: {"nearest": "nearest", "linear": "bilinear", "cubic": "bicubic"},
    3: {"nearest": "nearest", "linear": "trilinear"},
}


@operator("Resize")
def _resize(call: Call) -> Value:
    value = call.inputs[0]
    scales, sizes = call.input(2), call.input(3)
    if scales is not None and not isinstance(scales, Numbers) and example_of(scales).numel() == 0:
        scales = None
    shape = example_of(value).shape
    given = call.attribute("axes")
    axes = [call.axis(axis) for axis in given] if given else list(range(call.rank()))
    if call.attribute("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise call.refusal("keep_aspect_ratio_policy has no rule")
    wanted: dict[int, Number] = {}
    factors: dict[int, float] = {}
    if sizes is not None:
        wanted = dict(zip(axes, call.graph.sizes(sizes), strict=True))
    elif scales is not None:
        factors = dict(zip(axes, items_of(call.constant(2, "scales")), strict=True))
    else:
        raise call.refusal("it has neither sizes nor scales")
    spatial = range(2, call.rank())
    targets: list[Number] = [
        wanted[a] if a in wanted else math.floor(shape[a] * factors.get(a, 1.0)) for a in range(call.rank())
    ]
    call.limited(tuple(targets))
    is_plain = all(example_of(targets[axis]) == shape[axis] for axis in (0, 1) if axis < call.rank())
    function = _of_torch(call) if is_plain else None
    if function is not None:
        mode, align = function
        settings: dict[str, Any] = {"mode": mode}
        if align is not None:
            settings["align_corners"] = align
        if factors:
            return call.emit(F.interpolate, value, scale_factor=tuple(factors.get(a, 1.0) for a in spatial), **settings)
        return call.emit(F.interpolate, value, size=tuple(targets[a] for a in spatial), **settings)
    for axis in range(call.rank()):
        size, target = shape[axis], int(example_of(targets[axis]))
        if size != target:
            scale = factors.get(axis, target / size)
            value = _along(call, value, axis, _weights(call, size, target, scale))
    return value


def _of_torch(call: Call) -> tuple[str, bool | None] | None:
    """The mode and `align_corners` of F.interpolate that compute the same; None if there is none."""
    mode = call.attribute("mode", "nearest")
    position = call.attribute("coordinate_transformation_mode", "half_pixel")
    name = _MODES.get(call.rank() - 2, {}).get(mode)
    if name is None or call.attribute("antialias", 0) or call.attribute("exclude_outside", 0):
        return None
    if mode == "nearest":
        rounding = call.attribute("nearest_mode", "round_prefer_floor")
        if (position, rounding) == ("asymmetric", "floor"):
            return name, None
        return None
    if mode == "cubic" and call.attribute("cubic_coeff_a", -0.75) != -0.75:
        return None
    if position == "align_corners":
        return name, True
    return (name, False) if position in ("half_pixel", "pytorch_half_pixel") else None


def _along(call: Call, value: Value, axis: int, weights: Tensor) -> Value:
    """The product with the weights (target, size) along an axis; a selection where each row has one weight."""
    is_selection = bool(((weights != 0).sum(1) == 1).all() and (weights.sum(1) == 1).all())
    if is_selection:
        return call.emit(torch.index_select, value, axis, weights.argmax(1))
    last = call.rank() - 1
    if axis == last:
        return call.emit(torch.matmul, value, weights.t().contiguous().to(example_of(value).dtype))
    moved = call.emit(torch.transpose, value, axis, last)
    found = call.emit(torch.matmul, moved, weights.t().contiguous().to(example_of(value).dtype))
    return call.emit(torch.transpose, found, axis, last)


def _weights(call: Call, size: int, target: int, scale: float) -> Tensor:
    """The share of each source element in each result, as ONNX defines it; (target, size)."""
    mode = call.attribute("mode", "nearest")
    if call.attribute("antialias", 0) and scale < 1:
        raise call.refusal("antialias=1 has no rule")
    position = call.attribute("coordinate_transformation_mode", "half_pixel")
    places = numpy.arange(target, dtype=numpy.float64)
    if position == "align_corners":
        places = places * (size - 1) / (target - 1) if target > 1 else places * 0
    elif position == "asymmetric":
        places = places / scale
    elif position == "pytorch_half_pixel":
        places = (places + 0.5) / scale - 0.5 if target > 1 else places * 0
    elif position == "half_pixel":
        places = (places + 0.5) / scale - 0.5
    elif position == "half_pixel_symmetric":
        places = size / 2 * (1 - target / (scale * size)) + (places + 0.5) / scale - 0.5
    else:
        raise call.refusal(f"coordinate_transformation_mode={position} has no rule")
    found = torch.zeros(target, size, dtype=torch.float64)
    for row, place in enumerate(places.tolist()):
        for source, share in _sources(call, mode, place):
            if 0 <= source < size or not call.attribute("exclude_outside", 0):
                found[row, min(max(source, 0), size - 1)] += share
    return found / found.sum(1, keepdim=True)


def _sources(call: Call, mode: str, place: float) -> list[tuple[int, float]]:
    below = math.floor(place)
    rest = place - below
    if mode == "nearest":
        rounding = call.attribute("nearest_mode", "round_prefer_floor")
        chosen = {
            "round_prefer_floor": math.ceil(place - 0.5), "round_prefer_ceil": math.floor(place + 0.5),
            "floor": below, "ceil": math.ceil(place),
        }[rounding]  # fmt: skip
        return [(chosen, 1.0)]
    if mode == "linear":
        return [(below, 1 - rest), (below + 1, rest)]
    a = float(call.attribute("cubic_coeff_a", -0.75))

    def share(distance: float) -> float:
        x = abs(distance)
        if x <= 1:
            return (a + 2) * x**3 - (a + 3) * x**2 + 1
        return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a

    return [(below + step, share(rest - step)) for step in (-1, 0, 1, 2)]
