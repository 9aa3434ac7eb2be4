"""Constants, and tensors that are made of a shape."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsebit.deploy.loading.building.call import Call, tensor_of, torch_type
from sparsebit.deploy.loading.building.operator_table import operator
from sparsebit.deploy.loading.building.values import Value, example_of
from sparsebit.deploy.onnx_graph.packages import onnx

_CONSTANTS: dict[str, torch.dtype | None] = {
    "value": None, "value_float": torch.float32, "value_floats": torch.float32,
    "value_int": torch.int64, "value_ints": torch.int64,
}  # fmt: skip


@operator("Identity")
def _identity(call: Call) -> Value:
    return call.inputs[0]


@operator("Constant")
def _constant(call: Call) -> Tensor:
    node = call.node
    if len(node.attribute) != 1 or node.attribute[0].name not in _CONSTANTS:
        raise call.refusal("a constant of numbers is allowed, neither sparse nor of texts")
    value = onnx.helper.get_attribute_value(node.attribute[0])
    dtype = _CONSTANTS[node.attribute[0].name]
    return tensor_of(value) if dtype is None else torch.tensor(value, dtype=dtype)


@operator("ConstantOfShape")
def _constant_of_shape(call: Call) -> Value:
    stored = call.attribute("value")
    value = torch.zeros(1) if stored is None else tensor_of(stored)
    sizes = call.limited(call.graph.sizes(call.inputs[0]))
    return call.emit(torch.full, sizes, value.item(), dtype=value.dtype)


@operator("Range")
def _range(call: Call) -> Value:
    dtype = example_of(call.inputs[0]).dtype
    first, last, step = (call.graph.sizes(value)[0] for value in call.inputs)
    start, end, stride = (example_of(one) for one in (first, last, step))
    call.limited((max(int((end - start) / (stride or 1)), 0),))
    return call.emit(torch.arange, first, last, step, dtype=dtype)


@operator("EyeLike")
def _eye_like(call: Call) -> Value:
    value = call.inputs[0]
    number = call.attribute("dtype")
    dtype = example_of(value).dtype if number is None else torch_type(number, call)
    rows, columns = (call.fixed_size(axis) for axis in range(2))
    if rows is None or columns is None:
        raise call.refusal("a unit matrix of a size that the file leaves open has no rule")
    offset = call.attribute("k", 0)
    return torch.diag(torch.ones(max(rows, columns) + abs(offset), dtype=dtype), offset)[:rows, :columns]
