"""`Graph`: an ONNX graph by names: producers and readers of values, constants, and how values are quantized.

It is a read-only view of protobuf messages, for files of any tool; rewrites (`layouts`, `exporting`) work on onnx-ir
models instead. Ops that only move elements (`MOVES`) are looked through, since runtimes move Q and DQ through them.
"""

from __future__ import annotations

import functools
import math
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sparsebit.deploy.onnx_graph.model_file import need_file
from sparsebit.deploy.onnx_graph.packages import ir, onnx
from sparsebit.errors import DeploymentError

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
# Keys in the metadata of our exports: the backend; at a node: the config key that keeps it in float, and a mark on
# layers that are meant to be computed in float.
BACKEND_KEY, OFF_KEY, FLOAT_KEY = "sparsebit.backend", "sparsebit.switched_off", "sparsebit.float"
TWO_GIGABYTES = 2**31 - 2**20  # the largest protobuf message, with a margin
# Ops that only move elements: a scale before one is equivalent to a scale after it.
MOVES = frozenset({"Identity", "Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze"})


@dataclass(frozen=True)
class Quantization:
    """The parameters of one Q or DQ node. `scale` and `zero_point` are arrays, None if they are not constant.

    `dtype` is ONNX's name of the integers (`uint8`, `int4`, `float8e4m3fn`), `axis` only applies to several
    scales; `block` is 0 without blocks.
    """

    node: Any
    dtype: str
    scale: Any
    zero_point: Any
    axis: int
    block: int

    @property
    def per_tensor(self) -> bool:
        return self.scale is not None and self.scale.size == 1

    @property
    def symmetric(self) -> bool:
        """Whether every zero point is 0 (an absent one is)."""
        return self.zero_point is None or not self.zero_point.astype("float32").any()

    def same_grid(self, other: Quantization) -> bool:
        """Whether both round to exactly the same numbers."""
        if self.scale is None or other.scale is None or self.dtype != other.dtype:
            return False
        mine, theirs = ((q.scale.ravel().tolist(), _flat(q.zero_point, q.scale.size)) for q in (self, other))
        return mine == theirs


def load_model(file: str | os.PathLike[str] | Any) -> Any:
    """The ModelProto of a file (or the given one), with its local functions inlined, as runtimes do too."""
    if isinstance(file, onnx.ModelProto):
        model = file
    else:
        need_file(file)
        try:
            model = onnx.load(os.fspath(file))
        except Exception as error:  # protobuf's exception classes differ by version
            raise DeploymentError(f"{file} is not an ONNX file: {error}") from error
        if not model.graph.node:
            raise DeploymentError(f"{file} is not an ONNX file, or holds no node")
        _refuse_damaged(model, file)
    if not model.functions:
        return model
    from onnx import inliner

    return inliner.inline_local_functions(model)


def _refuse_damaged(model: Any, file: str | os.PathLike[str]) -> None:
    """Raise for a file whose stored tensors do not have the number of bytes that their shapes require."""
    for tensor in model.graph.initializer:
        wanted = stored_bytes(tensor.data_type, math.prod(tensor.dims)) if tensor.HasField("raw_data") else None
        if any(size < 0 for size in tensor.dims) or wanted not in (None, len(tensor.raw_data)):
            shown = f"{tensor.name!r} of shape {list(tensor.dims)} has {len(tensor.raw_data)} bytes"
            raise DeploymentError(
                f"{file} is damaged: its tensor {shown}" + ("" if wanted is None else f", not {wanted}")
            )


def stored_bytes(data_type: int, count: int) -> int | None:
    """Bytes of `count` stored numbers; None for an unknown type."""
    try:
        bits = ir.DataType(data_type).bitwidth
    except (TypeError, ValueError, KeyError):
        return None
    return -(-count * int(bits) // 8)


class Graph:
    """A view of a model's main graph, without nodes that no output needs. Later changes of the model are not seen."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.nodes: list[Any] = _needed(model.graph)
        self.initializers: dict[str, Any] = {tensor.name: tensor for tensor in model.graph.initializer}
        self.outputs: set[str] = {value.name for value in model.graph.output}
        self.producer: dict[str, Any] = {name: node for node in self.nodes for name in node.output if name}
        self.readers: dict[str, list[Any]] = defaultdict(list)
        for node in self.nodes:
            for name in dict.fromkeys(node.input):
                if name:
                    self.readers[name].append(node)

    @property
    def backend(self) -> str:
        """The backend in the metadata of our exports; empty in files of other tools."""
        return next((item.value for item in self.model.metadata_props if item.key == BACKEND_KEY), "")

    def constant(self, name: str) -> Any:
        """The value as an array, None if it is computed."""
        tensor = self.stored(name)
        return None if tensor is None else onnx.numpy_helper.to_array(tensor)

    def stored(self, name: str) -> Any:
        """The TensorProto behind `name`: an initializer or a Constant, also through Identity; None if computed."""
        node = self.producer.get(name)
        if name in self.initializers or node is None:
            return self.initializers.get(name)
        if node.op_type == "Identity":
            return self.stored(node.input[0])
        return attribute(node, "value") if node.op_type == "Constant" else None

    def quantization(self, node: Any) -> Quantization:
        """The parameters of a Q or DQ node."""
        scale = self.constant(node.input[1])
        zero_point = self.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else None
        axis = 0 if scale is not None and scale.size == 1 else attribute(node, "axis", 1)
        return Quantization(node, self._quantized_type(node), scale, zero_point, axis, attribute(node, "block_size", 0))

    def dequantized(self, name: str) -> Quantization | None:
        """How the value is quantized: its DQ node, also one before ops that only move elements."""
        node = self.producer.get(name)
        while node is not None and node.op_type in MOVES:
            node = self.producer.get(node.input[0])
        return self.quantization(node) if node is not None and node.op_type == DEQUANTIZE else None

    def is_weight(self, name: str) -> bool:
        """Whether the value is constant, quantized or not."""
        if self.stored(name) is not None:
            return True
        node = self.producer.get(name)
        if node is None or node.op_type not in {*MOVES, QUANTIZE, DEQUANTIZE, "Cast"}:
            return False
        return self.is_weight(node.input[0])

    def behind(self, name: str) -> Iterator[Any]:
        """The nodes that read the value, looking through ops that only move elements."""
        for node in self.readers[name]:
            if node.op_type in MOVES and node.input[0] == name:
                yield from self.behind(node.output[0])
            else:
                yield node

    def reaches_output(self, name: str) -> bool:
        """Whether the value itself, or a moved copy of it, is an output of the model."""
        return name in self.outputs or any(
            self.reaches_output(node.output[0]) for node in self.readers[name] if node.op_type in MOVES
        )

    def type_of(self, name: str) -> str:
        """ONNX's name of the element type, `` if the file does not say."""
        tensor = self.stored(name)
        number = tensor.data_type if tensor is not None else self._value_types.get(name, 0)
        return type_name(number) if number else ""

    @functools.cached_property
    def _value_types(self) -> dict[str, int]:
        graph = self.model.graph
        values = [*graph.value_info, *graph.input, *graph.output]
        return {value.name: value.type.tensor_type.elem_type for value in values}

    def _quantized_type(self, node: Any) -> str:
        if len(node.input) > 2 and node.input[2] and (found := self.type_of(node.input[2])):
            return found
        if node.op_type == DEQUANTIZE:
            source = self.producer.get(node.input[0])
            if source is not None and source.op_type == QUANTIZE:
                return self._quantized_type(source)
            return self.type_of(node.input[0]) or "uint8"
        number = attribute(node, "output_dtype", 0)
        return type_name(number) if number else "uint8"  # ONNX's own default


def attribute(node: Any, name: str, default: Any = None) -> Any:
    """A node's attribute by name."""
    found = (onnx.helper.get_attribute_value(item) for item in node.attribute if item.name == name)
    return next(found, default)


@functools.cache
def type_name(number: int) -> str:
    """3 -> `int8`."""
    return str(onnx.TensorProto.DataType.Name(number)).lower()


def outer_values(node: Any) -> set[str]:
    """Values of the main graph that a node's subgraphs (If, Loop) read."""
    found: set[str] = set()
    for item in node.attribute:
        for inner in [*([item.g] if item.HasField("g") else []), *item.graphs]:
            for inside in inner.node:
                found |= set(inside.input) | outer_values(inside)
            found |= {value.name for value in inner.output}
    return found


def opset(model: Any) -> int:
    """The version of ONNX's own operators in the file."""
    return next((int(entry.version) for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)


def _needed(graph: Any) -> list[Any]:
    """The nodes that lead to an output, in order: a runtime drops the others before it fuses."""
    wanted = {value.name for value in graph.output}
    kept = []
    for node in reversed(graph.node):
        if wanted.intersection(node.output):
            kept.append(node)
            wanted |= set(node.input) | outer_values(node)
    return kept[::-1]


def _flat(zero_point: Any, size: int) -> list[float]:
    return [0.0] * size if zero_point is None else [float(value) for value in zero_point.ravel()]
