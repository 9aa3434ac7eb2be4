"""Values of an onnx_ir graph: what computes them, their stored numbers, and constants that a layout adds."""

from __future__ import annotations

from typing import Any

from sparsebit.deploy.onnx_graph.packages import ir


def producer(value: ir.Value | None, *ops: str) -> ir.Node | None:
    """The node that computes a value, if it is one of these ops; None for an input, a constant or another op."""
    node = None if value is None else value.producer()
    return node if node is not None and (not ops or node.op_type in ops) else None


def stored(value: ir.Value | None) -> Any:
    """The numbers of a constant as an array; None if the value is absent or computed."""
    return None if value is None or value.const_value is None else value.const_value.numpy()


def is_single(value: ir.Value | None) -> bool:
    """Whether the value is one stored number."""
    return value is not None and value.const_value is not None and value.const_value.size == 1


def become(value: ir.Value, old: ir.Value, name: str | None = None) -> ir.Value:
    """The value with the shape, the type and the name of another one (or this name)."""
    value.name, value.shape, value.type = name or old.name, old.shape, old.type
    return value


def put_instead(model: ir.Model, old: ir.Node, new: list[ir.Node]) -> None:
    """Replace a node of one output by nodes of which the last computes the same."""
    value = become(new[-1].outputs[0], old.outputs[0])
    model.graph.insert_before(old, new)
    ir.convenience.replace_all_uses_with(old.outputs[0], value, replace_graph_outputs=True)
    model.graph.remove(old, safe=True)


def remove_unread(model: ir.Model, node: ir.Node) -> None:
    """Remove a node whose output nothing reads."""
    if not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
        model.graph.remove(node, safe=True)


def stored_once(model: ir.Model, name: str, array: Any, dtype: ir.DataType | None = None) -> ir.Value:
    """The initializer of this name, created from `array` if the file has none yet."""
    if name not in model.graph.initializers:
        tensor, shape = ir.Tensor(array, dtype=dtype, name=name), ir.Shape(list(array.shape))
        value = ir.Value(name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=shape)
        model.graph.register_initializer(value)
    return model.graph.initializers[name]
