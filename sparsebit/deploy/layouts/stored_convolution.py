"""A convolution of an ONNX graph together with the tensors that only it reads, so that both can be changed together.

Added channels are zeros in weight and bias; scales are repeated, since a scale of 0 is invalid. A convolution is left
out (`read` returns None) if a tensor of it has another reader, or a weight has a zero point other than 0: a stored zero
would not mean 0 there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sparsebit.deploy.onnx_graph.ir_values import producer
from sparsebit.deploy.onnx_graph.packages import ir, numpy
from sparsebit.deploy.onnx_graph.qdq_graph import DEQUANTIZE, QUANTIZE

_INTEGERS = ("INT8", "UINT8")
_ABSORBED = ("Relu", "Clip")


@dataclass
class StoredConvolution:
    """`weight`, `bias`: stored numbers, integers where a DequantizeLinear reads them.

    `per_output`: further stored tensors with a number for each output channel: scales and zero points.
    """

    node: ir.Node
    weight: ir.Value
    bias: ir.Value | None
    per_output: list[ir.Value]

    @staticmethod
    def read(node: ir.Node) -> StoredConvolution | None:
        """None if a tensor is computed, or read by another node too, or has zero points other than 0."""
        per_output: list[ir.Value] = []
        weight = _stored(node.inputs[1], per_output)
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        stored_bias = None if bias is None else _stored(bias, per_output)
        if weight is None or len(_array(weight).shape) != 4 or (bias is not None and stored_bias is None):
            return None
        return StoredConvolution(node, weight, stored_bias, per_output)

    @property
    def ends(self) -> tuple[ir.Value, ir.Value]:
        """Its input and its output."""
        x = self.node.inputs[0]
        assert x is not None
        return x, self.node.outputs[0]

    @property
    def num_groups(self) -> int:
        attribute = self.node.attributes.get("group")
        return 1 if attribute is None else int(attribute.as_int())

    @property
    def group_inputs(self) -> int:
        """Input channels of one group."""
        return int(_array(self.weight).shape[1])

    @property
    def num_outputs(self) -> int:
        return int(_array(self.weight).shape[0])

    @property
    def num_taps(self) -> int:
        """Height times width of the kernel."""
        return math.prod(_array(self.weight).shape[2:])

    @property
    def group_outputs(self) -> int:
        return self.num_outputs // self.num_groups

    @property
    def is_dense(self) -> bool:
        return self.num_groups == 1

    @property
    def is_square(self) -> bool:
        """Whether every group has as many outputs as inputs, so that the channels of both sides correspond."""
        return self.group_inputs == self.group_outputs

    @property
    def is_depthwise(self) -> bool:
        return self.num_groups > 1 and self.is_square and self.group_inputs == 1

    @property
    def is_integer(self) -> bool:
        """Whether a runtime can compute it in integers: input, weight and result are quantized."""
        x, weight = self.node.inputs[0], self.node.inputs[1]
        kind = self.weight.const_value
        if weight is self.weight or kind is None or kind.dtype.name not in _INTEGERS or not producer(x, DEQUANTIZE):
            return False
        users = [user for user, _ in self.node.outputs[0].uses()]
        if len(users) == 1 and users[0].op_type in _ABSORBED:
            users = [user for user, _ in users[0].outputs[0].uses()]
        return bool(users) and all(user.op_type == QUANTIZE for user in users)

    def add_outputs(self, count: int) -> None:
        """Add output channels, after the others, that are zero for every input."""
        for value in (self.weight, self.bias):
            if value is not None:
                _extend(value, 0, count)
        for value in self.per_output:
            _extend(value, 0, count, repeat=True)  # a scale must not be 0

    def add_inputs(self, count: int) -> None:
        """Add input channels to every group, after the others, with zero weights."""
        _extend(self.weight, 1, count)

    def add_groups(self, count: int) -> None:
        """Add groups, after the others, whose output is zero."""
        self.add_outputs(count * self.group_outputs)
        self._set_groups(self.num_groups + count)

    def join_groups(self, count: int) -> None:
        """Join each `count` groups into one, with zeros for the inputs of other groups."""
        old, inputs, outputs = _array(self.weight), self.group_inputs, self.group_outputs
        new = numpy.zeros((old.shape[0], inputs * count, *old.shape[2:]), old.dtype)
        for row in range(old.shape[0]):
            start = row // outputs % count * inputs
            new[row, start : start + inputs] = old[row]
        _store(self.weight, new)
        self._set_groups(self.num_groups // count)

    def _set_groups(self, count: int) -> None:
        self.node.attributes["group"] = ir.AttrInt64("group", count)


def _stored(value: ir.Value | None, per_output: list[ir.Value]) -> ir.Value | None:
    """The stored tensor of `value`; its scales are added to `per_output`; None if it cannot be changed separately."""
    if value is None or len(value.uses()) != 1 or value.is_graph_output():
        return None
    node = value.producer()
    if node is None:
        return value if value.const_value is not None and value.is_initializer() else None
    if node.op_type != DEQUANTIZE or "block_size" in node.attributes:
        return None
    values = [one for one in node.inputs if one is not None]
    if any(not one.is_initializer() or one.const_value is None or len(one.uses()) != 1 for one in values):
        return None
    codes, *numbers = values
    if len(numbers) > 1 and _array(numbers[1]).any():
        return None
    several = [one for one in numbers if _array(one).size > 1]
    axis = node.attributes.get("axis")
    if several and axis is not None and axis.as_int() % len(_array(codes).shape) != 0:
        return None
    per_output += several
    return codes


def _extend(value: ir.Value, axis: int, count: int, *, repeat: bool = False) -> None:
    array = _array(value)
    shape = list(array.shape)
    shape[axis] = count
    more = numpy.take(array, [-1] * count, axis) if repeat else numpy.zeros(shape, array.dtype)
    _store(value, numpy.concatenate([array, more], axis))


def _store(value: ir.Value, array: Any) -> None:
    """Store new numbers of a tensor, and update its shape and those of derived values."""
    assert value.const_value is not None
    value.const_value = ir.Tensor(array, dtype=value.const_value.dtype, name=value.name)
    value.shape = ir.Shape(array.shape)
    for user, position in value.uses():
        if user.op_type == DEQUANTIZE and position == 0:
            user.outputs[0].shape = ir.Shape(array.shape)


def _array(value: ir.Value) -> Any:
    assert value.const_value is not None
    return value.const_value.numpy()
