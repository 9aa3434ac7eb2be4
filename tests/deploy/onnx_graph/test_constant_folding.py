from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from sparsebit.deploy.onnx_graph.constant_folding import fold_constants


def graph() -> tuple[ir.Model, dict[str, ir.Value]]:
    """x, w, and values computed from them; `guarded` comes from a node that stops the folding."""
    x = ir.Value(name="x", shape=ir.Shape((3,)), type=ir.TensorType(ir.DataType.FLOAT))
    w = ir.Value(name="w", const_value=ir.tensor(np.array([1.0, 2.0, 4.0], np.float32), name="w"))
    w.shape, w.dtype = ir.Shape((3,)), ir.DataType.FLOAT
    double = ir.node("Add", [w, w], name="double")
    square = ir.node("Mul", [double.outputs[0], w], name="square")
    dynamic = ir.node("Mul", [square.outputs[0], x], name="dynamic")
    stopped = ir.node("Identity", [w], name="stopped")
    guarded = ir.node("Add", [stopped.outputs[0], w], name="guarded")
    nodes = [double, square, dynamic, stopped, guarded]
    for node in nodes:
        node.outputs[0].name = node.name
        node.outputs[0].shape, node.outputs[0].dtype = ir.Shape((3,)), ir.DataType.FLOAT
    made = ir.Graph(
        [x], [dynamic.outputs[0], guarded.outputs[0]], nodes=nodes, initializers=[w], opset_imports={"": 21}
    )
    return ir.Model(made, ir_version=10), {str(node.name): node.outputs[0] for node in nodes}


def readers(model: ir.Model, name: str) -> list[Any]:
    return [value.const_value for node in model.graph if node.name == name for value in node.inputs if value]


def test_what_hangs_on_constants_alone_becomes_one() -> None:
    model, values = graph()
    fold_constants(model, [values["square"]], stop=lambda node: False)
    constant = readers(model, "dynamic")[0]
    assert constant is not None and constant.numpy().tolist() == [2.0, 8.0, 32.0]


@pytest.mark.parametrize("name", ["dynamic", "guarded"])
def test_what_hangs_on_an_input_or_a_stop_does_not(name: str) -> None:
    model, values = graph()
    before = [node.name for node in model.graph]
    fold_constants(model, [values[name], None], stop=lambda node: node.name == "stopped")
    assert [node.name for node in model.graph] == before
