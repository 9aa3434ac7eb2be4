"""Operators that read or write elements at places that are computed."""

from __future__ import annotations

import operator as python

import torch
import torch.nn.functional as F
from torch import fx, nn

from sparsebit.deploy.loading.building.call import Call
from sparsebit.deploy.loading.building.operator_table import operator
from sparsebit.deploy.loading.building.values import Numbers, Value, example_of, is_constant


@operator("Gather")
def _gather(call: Call) -> Value:
    value, index = call.inputs
    axis = call.axis(call.attribute("axis", 0))
    if (
        is_constant(value)
        and value.ndim == 2
        and axis == 0
        and value.is_floating_point()
        and isinstance(index, fx.Proxy)
    ):
        layer = nn.Embedding(value.shape[0], value.shape[1], device="meta")
        return call.layer(layer, "embedding", {"weight": value}, call.method("to", index, torch.int64))
    if is_constant(index) and index.ndim == 0:
        return call.emit(torch.select, value, axis, int(index))
    if isinstance(index, Numbers) and not index.shape:
        return call.emit(torch.select, value, axis, index.items[0])
    size = call.fixed_size(axis)
    if is_constant(index) and index.ndim == 1 and (size is not None or not (index < 0).any()):
        index = index if size is None else torch.where(index < 0, index + size, index)
        return call.emit(torch.index_select, value, axis, index)
    index = call.method("to", call.graph.tensor(index), torch.int64)
    return call.emit(python.getitem, value, (*[slice(None)] * axis, index))


@operator("GatherElements")
def _gather_elements(call: Call) -> Value:
    axis = call.axis(call.attribute("axis", 0))
    return call.emit(torch.gather, call.inputs[0], axis, _from_front(call, call.inputs[1], axis))


def _from_front(call: Call, index: Value, axis: int) -> Value:
    """Constant indices counted from the front: ONNX allows negative ones; for others torch.gather raises."""
    index = call.method("to", index, torch.int64)
    if not is_constant(index) or not (index < 0).any():
        return index
    return call.emit(torch.where, index < 0, call.emit(torch.add, index, call.size(axis)), index)


@operator("GatherND")
def _gather_nd(call: Call) -> Value:
    value, index = call.inputs
    batch = call.attribute("batch_dims", 0)
    depth = example_of(index).shape[-1]
    parts = [call.emit(torch.select, index, -1, place) for place in range(depth)]
    if not batch:
        return call.emit(python.getitem, value, tuple(parts))
    sizes = example_of(index).shape
    places = []
    for axis in range(batch):
        steps = call.emit(torch.arange, call.size(axis))
        places.append(call.method("reshape", steps, [-1 if a == axis else 1 for a in range(len(sizes) - 1)]))
    return call.emit(python.getitem, value, (*places, *parts))


@operator("ScatterND")
def _scatter_nd(call: Call) -> Value:
    value, index, updates = call.inputs
    reduction = call.attribute("reduction", "none")
    if reduction not in ("none", "add"):
        raise call.refusal(f"reduction {reduction}; allowed: none, add")
    depth = example_of(index).shape[-1]
    parts = tuple(call.emit(torch.select, index, -1, place) for place in range(depth))
    if any(map(is_constant, parts)):
        parts = tuple(call.method("to", part, torch.int64) for part in parts)
    return call.emit(torch.index_put, value, parts, updates, reduction == "add")


@operator("ScatterElements", "Scatter")
def _scatter_elements(call: Call) -> Value:
    value, index, updates = call.inputs
    axis = call.axis(call.attribute("axis", 0))
    reduction = call.attribute("reduction", "none")
    index = _from_front(call, index, axis)
    if reduction == "none":
        return call.emit(torch.scatter, value, axis, index, updates)
    names = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
    return call.emit(torch.scatter_reduce, value, axis, index, updates, names[reduction])


@operator("NonZero")
def _non_zero(call: Call) -> Value:
    return call.method("t", call.emit(torch.nonzero, call.inputs[0]))


@operator("OneHot")
def _one_hot(call: Call) -> Value:
    index, values = call.inputs[0], call.constant(2, "values")
    depth = int(call.constant(1, "depth").item())
    axis = call.attribute("axis", -1)
    steps = torch.arange(call.limited((depth,))[0])
    index = call.method("to", index, torch.int64)
    index = call.emit(torch.where, call.emit(torch.lt, index, 0), call.emit(torch.add, index, depth), index)
    final = call.rank() + 1
    hot = call.emit(
        torch.eq,
        call.emit(torch.unsqueeze, index, axis % final),
        steps.reshape([-1 if a == axis % final else 1 for a in range(final)]),
    )
    return call.emit(torch.where, hot, values[1], values[0])


@operator("GridSample", first=16)
def _grid_sample(call: Call) -> Value:
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(
        call.attribute("mode", "bilinear"), call.attribute("mode", "bilinear")
    )
    padding = call.attribute("padding_mode", "zeros")
    return call.emit(F.grid_sample, *call.inputs, mode, padding, bool(call.attribute("align_corners", 0)))
