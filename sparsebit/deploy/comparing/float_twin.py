"""`float_twin`: the same file without its quantization, to measure the speedup when no float file is given.

Weights become float initializers with the dequantized values; Q/DQ pairs on activations are removed; integer operators
become the float operators of the same name (`float_operators.py`). So the outputs differ from the quantized file's only
by the rounding of activations.
"""

from __future__ import annotations

import os
from typing import Any

from sparsebit.deploy.comparing.float_operators import FLOAT_OPERATORS, is_integer_operator, no_twin
from sparsebit.deploy.layouts.hard_sigmoid_layout import hard_sigmoid_attributes, is_hard_sigmoid
from sparsebit.deploy.onnx_graph.dequantize import dequantize
from sparsebit.deploy.onnx_graph.packages import numpy, onnx
from sparsebit.deploy.onnx_graph.qdq_graph import (
    DEQUANTIZE,
    QUANTIZE,
    Graph,
    attribute,
    load_model,
    outer_values,
    type_name,
)
from sparsebit.errors import DeploymentError

_CODE_TYPES = ("int2", "uint2", "int4", "uint4", "int8", "uint8", "int16", "uint16")


def float_twin(file: str | os.PathLike[str] | Any) -> Any:
    """The float model of a quantized file (a path or a ModelProto); the file's names of inputs and outputs stay."""
    model = load_model(file)
    writer = _Writer(model)
    for node in writer.graph.nodes:
        operator = FLOAT_OPERATORS.get(node.op_type)
        if is_hard_sigmoid(node):
            writer.add("HardSigmoid", [node.input[0]], node.output[0], hard_sigmoid_attributes(), node.name)
        elif node.op_type == QUANTIZE:
            writer.rename(node.output[0], node.input[0])
        elif node.op_type == DEQUANTIZE:
            _without_dequantize(writer, node)
        elif node.op_type == "Gather" and writer.is_code_table(node.input[0]):
            _with_float_table(writer, node)
        elif operator is not None:
            operator(writer, node)
        elif is_integer_operator(node):
            raise no_twin(node)
        else:
            writer.keep(node)
    return writer.model()


def _without_dequantize(writer: _Writer, node: Any) -> None:
    """A stored weight becomes float; the DQ after a Q is removed; one after an integer input of the model stays."""
    source = writer.current(node.input[0])
    values = writer.constant(node.input[0])
    if values is not None and writer.is_integer(node.input[0]):
        found = writer.graph.quantization(node)
        if found.scale is None:
            raise DeploymentError(f"{node.name or node.output[0]}: a stored weight whose scale is computed")
        axis = attribute(node, "axis", 1)
        floats = dequantize(values, found.scale, found.zero_point, axis=axis, block=found.block)
        writer.store(node.output[0], floats, found.scale)
    elif writer.comes_from_quantize(node.input[0]) or values is not None:
        writer.rename(node.output[0], source)
    else:
        writer.keep(node)


def _with_float_table(writer: _Writer, node: Any) -> None:
    """An embedding that is looked up as integers: the same numbers as floats; the Cast after it does nothing."""
    table = f"{node.input[0]}/float"
    writer.store(table, numpy.asarray(writer.constant(node.input[0])).astype(numpy.float32))
    writer.rename(node.input[0], table)
    writer.keep(node)


class _Writer:
    """The twin's graph in progress: nodes in order, float initializers, and the new name of each old value."""

    def __init__(self, model: Any) -> None:
        self.graph = Graph(model)
        self._model = model
        self._names: dict[str, str] = {}
        self._nodes: list[Any] = []
        self._floats: dict[str, Any] = {}

    def current(self, name: str) -> str:
        """The value's name in the twin."""
        while name in self._names:
            name = self._names[name]
        return name

    def constant(self, name: str) -> Any:
        """The array of a name in the quantized file, None if it is computed."""
        return self.graph.constant(self.current(name))

    def is_integer(self, name: str) -> bool:
        """Whether the stored value is of a quantized type, rather than a float weight with a Q/DQ pair on it."""
        tensor = self.graph.stored(self.current(name))
        return tensor is not None and type_name(tensor.data_type) not in ("float", "float16", "bfloat16")

    def is_code_table(self, name: str) -> bool:
        """Whether the value is stored and of a type that only quantized numbers have."""
        tensor = self.graph.stored(self.current(name))
        return tensor is not None and type_name(tensor.data_type) in _CODE_TYPES

    def comes_from_quantize(self, name: str) -> bool:
        """Whether the value comes from a Q or an operator with integer output, directly or through other nodes."""
        node = self.graph.producer.get(name)
        while node is not None:
            if node.op_type in (QUANTIZE, "DynamicQuantizeLinear") or is_integer_operator(node):
                return True
            node = self.graph.producer.get(node.input[0]) if node.input else None
        return False

    def rename(self, old: str, new: str) -> None:
        """Later nodes read `new` instead of `old`. An output of the model keeps its name, by an Identity."""
        if old in self.graph.outputs:
            self.add("Identity", [new], old)
        else:
            self._names[old] = new

    def store(self, name: str, values: Any, like: Any = None) -> str:
        """A float initializer, of the type of `like` if that is a half-precision array."""
        array = values if like is None else values.astype(like.dtype)
        self._floats[name] = onnx.numpy_helper.from_array(array, name)
        return name

    def add(self, op: str, inputs: list[str], output: str, attributes: Any = (), name: str = "") -> None:
        read = [self.current(value) for value in inputs]
        node = onnx.helper.make_node(op, read, [output], name=name or f"{output}/{op}")
        node.attribute.extend(attributes)
        self._nodes.append(node)

    def keep(self, node: Any) -> None:
        kept = type(node)()
        kept.CopyFrom(node)
        for position, value in enumerate(node.input):
            kept.input[position] = self.current(value) if value else ""
        self._nodes.append(kept)

    def model(self) -> Any:
        """The finished twin: unread initializers dropped, integer outputs declared float."""
        old = self._model.graph
        used = {value for node in self._nodes for value in node.input} | self.graph.outputs
        used |= {value for node in self._nodes for value in outer_values(node)}
        stored = [tensor for tensor in old.initializer if tensor.name in used and tensor.name not in self._floats]
        twin = type(self._model)()
        twin.CopyFrom(self._model)
        stored += [tensor for name, tensor in self._floats.items() if name in used]
        twin.graph.CopyFrom(onnx.helper.make_graph(self._nodes, old.name, old.input, old.output, stored))
        for output in twin.graph.output:
            node = self.graph.producer.get(output.name)
            if node is not None and (node.op_type == QUANTIZE or is_integer_operator(node)):
                output.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
        return twin
