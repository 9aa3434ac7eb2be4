"""`Call`: what the row of an operator gets: the node, its inputs as values, its attributes, and the graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from sparsebit.deploy.loading.building.graph_builder import LARGEST_RESULT, GraphBuilder
from sparsebit.deploy.loading.building.values import Number, Value, example_of, is_constant, rank
from sparsebit.deploy.onnx_graph.packages import numpy, onnx
from sparsebit.errors import DeploymentError


@dataclass(frozen=True)
class Call:
    """`inputs`: None for an optional one that is left out. `opset`: of ONNX's own operators in the file."""

    node: Any
    inputs: tuple[Value, ...]
    opset: int
    graph: GraphBuilder

    def input(self, position: int) -> Value:
        """An input, None if it is absent."""
        return self.inputs[position] if position < len(self.inputs) else None

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute; texts as `str`."""
        found = (onnx.helper.get_attribute_value(item) for item in self.node.attribute if item.name == name)
        value = next(found, default)
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else value

    def setting(self, name: str, position: int, default: Any = None) -> list[int] | Any:
        """Integers that older opsets have as an attribute and newer ones as an input; constants."""
        given = self.attribute(name)
        if given is not None:
            return list(given)
        value = self.input(position)
        return default if value is None else self.constant(position, name).reshape(-1).tolist()

    def constant(self, position: int, what: str) -> Tensor:
        """An input that has to be constant."""
        value = self.inputs[position]
        if not is_constant(value):
            raise self.refusal(f"its {what} is computed at run time; it has to be a constant")
        assert isinstance(value, Tensor)
        return value

    def refusal(self, reason: str) -> DeploymentError:
        return DeploymentError(f"node {self.node.name or self.node.output[0]!r} ({self.node.op_type}): {reason}")

    def emit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.graph.emit(function, *args, **kwargs)

    def method(self, name: str, value: Value, *args: Any, **kwargs: Any) -> Any:
        return self.graph.method(name, value, *args, **kwargs)

    def number(self, function: Callable[..., Number], *items: Number) -> Number:
        """The function of Python numbers: computed now if all of them are known, else a node."""
        return self.emit(function, *items) if any(isinstance(i, fx.Proxy) for i in items) else function(*items)

    def size(self, axis: int, position: int = 0) -> Number:
        """The size of an axis of an input: a number if the file fixes it, else a node."""
        return self.graph.size(self.inputs[position], axis, self.node.input[position])

    def fixed_size(self, axis: int, position: int = 0) -> int | None:
        """The size of an axis of an input if the file fixes it, whatever the example's size is."""
        size = self.size(axis, position)
        return None if isinstance(size, fx.Proxy) else int(size)

    def layer(self, layer: nn.Module, key: Any, parameters: dict[str, Tensor | None], *args: Value) -> Value:
        return self.graph.layer(self.node, layer.eval(), key, parameters, *args)

    def rank(self, position: int = 0) -> int:
        return rank(self.inputs[position])

    def axis(self, given: int, position: int = 0) -> int:
        """An axis of an input, counted from the front."""
        size = self.rank(position)
        if not -size <= given < max(size, 1):
            raise self.refusal(f"axis {given} of a tensor of rank {size}")
        return given % size if size else 0

    def limited(self, sizes: tuple[Number, ...]) -> tuple[Number, ...]:
        """The sizes of a result, refused if no machine has memory for it."""
        count = 1
        for size in sizes:
            count *= max(int(example_of(size)), 1)
        if count > LARGEST_RESULT:
            raise self.refusal(f"its result has {count} numbers; at most {LARGEST_RESULT} are made")
        return sizes


def torch_type(number: int, call: Call) -> torch.dtype:
    """ONNX's number of an element type -> the torch type."""
    name = onnx.TensorProto.DataType.Name(number).lower() if number in onnx.TensorProto.DataType.values() else ""
    dtype = getattr(torch, {"float": "float32", "double": "float64"}.get(name, name), None)
    if not isinstance(dtype, torch.dtype):
        raise call.refusal(f"the element type {name or number} has no counterpart in torch")
    return dtype


def tensor_of(stored: Any) -> Tensor:
    """A TensorProto as a tensor."""
    array = onnx.numpy_helper.to_array(stored)
    if str(array.dtype) == "bfloat16":
        return torch.from_numpy(array.astype(numpy.float32)).to(torch.bfloat16)
    return torch.from_numpy(numpy.array(array))  # a copy that may be written to; of rank 0 too
