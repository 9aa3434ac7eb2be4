"""Sizes, and operators that change the shape alone."""

from __future__ import annotations

import operator as python

import torch
from torch import fx

from sparsebit.deploy.loading.building.call import Call
from sparsebit.deploy.loading.building.operator_table import operator
from sparsebit.deploy.loading.building.values import Number, Value, example_of, numbers, rank


@operator("Shape")
def _shape(call: Call) -> Value:
    first, last = call.attribute("start", 0), call.attribute("end", None)
    sizes = call.graph.shape(call.inputs[0], call.node.input[0])
    return numbers(call.graph.sizes(sizes)[first:last])


@operator("Size")
def _size(call: Call) -> Value:
    found: Number = 1
    for size in call.graph.sizes(call.graph.shape(call.inputs[0], call.node.input[0])):
        found = call.number(python.mul, found, size)
    return numbers([found], ())


@operator("Reshape")
def _reshape(call: Call) -> Value:
    value, target = call.inputs[0], call.inputs[1]
    sizes = list(call.graph.sizes(target))
    if not call.attribute("allowzero", 0):
        for axis, size in enumerate(sizes):
            if not isinstance(size, fx.Proxy) and size == 0:
                sizes[axis] = call.size(axis)
    return call.method("reshape", value, tuple(sizes))


@operator("Flatten")
def _flatten(call: Call) -> Value:
    value, axis = call.inputs[0], call.attribute("axis", 1)
    axis += call.rank() if axis < 0 else 0
    if axis == 0:
        return call.method("reshape", value, (1, -1))
    if axis == call.rank():
        return call.method("reshape", value, (-1, 1))
    value = call.emit(torch.flatten, value, axis)
    return value if axis == 1 else call.emit(torch.flatten, value, 0, axis - 1)


@operator("Squeeze")
def _squeeze(call: Call) -> Value:
    value = call.inputs[0]
    axes = call.setting("axes", 1)
    if not axes:
        fixed = [call.fixed_size(axis) for axis in range(call.rank())]
        if None in fixed:  # an axis that is 1 at run time goes too
            return call.emit(torch.squeeze, value)
        axes = [axis for axis, size in enumerate(fixed) if size == 1]
    for axis in sorted((call.axis(axis) for axis in axes), reverse=True):
        value = call.emit(torch.squeeze, value, axis)
    return value


@operator("Unsqueeze")
def _unsqueeze(call: Call) -> Value:
    value, axes = call.inputs[0], call.setting("axes", 1)
    final = rank(value) + len(axes)
    for axis in sorted(axis % final for axis in axes):
        value = call.emit(torch.unsqueeze, value, axis)
    return value


@operator("Expand")
def _expand(call: Call) -> Value:
    value, wanted = call.graph.tensor(call.inputs[0]), list(call.graph.sizes(call.inputs[1]))
    own = list(example_of(value).shape)
    extra = len(wanted) - len(own)
    if extra < 0:
        wanted, extra = [1] * -extra + wanted, 0
    call.limited(tuple(wanted))
    # ONNX broadcasts both ways: where the wanted size is 1 the tensor's own stays, which torch writes as -1.
    for axis, size in enumerate(own, extra):
        if not isinstance(wanted[axis], fx.Proxy) and (wanted[axis] == 1 or wanted[axis] == size != 1):
            wanted[axis] = -1 if wanted[axis] == 1 or call.fixed_size(axis - extra) else wanted[axis]
    if not any(isinstance(size, fx.Proxy) for size in wanted) and wanted == [-1] * len(own):
        return value
    return call.method("expand", value, tuple(wanted))
