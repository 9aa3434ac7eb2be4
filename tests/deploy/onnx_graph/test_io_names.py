from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest
import torch

from sparsebit.deploy.onnx_graph.io_names import apart, dynamic_shapes, named, rename_ports
from sparsebit.errors import DeploymentError

X = torch.zeros(2, 3, 4)


def test_given_names_come_first_and_the_rest_keeps_its_own() -> None:
    assert named(["x", "mask"], ["image"], "input_names") == ["image", "mask"]
    assert named(["x"], None, "input_names") == ["x"]
    assert named(["x"], (), "input_names") == ["x"]


@pytest.mark.parametrize(
    "given",
    [["a", "b", "c"], ["a", "a"], ["mask"], "x", [""], [3]],
    ids=["too_many", "repeated", "repeats_a_default", "a_text", "empty", "no_text"],
)
def test_names_that_cannot_be(given: Any) -> None:
    with pytest.raises(DeploymentError) as caught:
        named(["x", "mask"], given, "input_names")
    assert f"input_names={given!r}; allowed: a list of up to 2 names" in str(caught.value)
    assert str(caught.value).endswith("rename x, mask")


def test_an_output_like_an_input_steps_aside() -> None:
    assert apart(["x", "output.x"], ["x", "y", "output"], 0) == ["output.output.x", "y", "output"]
    assert apart(["a"], ["b"], 1) == ["b"]


def test_a_name_for_both_sides_is_refused() -> None:
    with pytest.raises(DeploymentError, match="t is an input and an output"):
        apart(["t"], ["t"], 1)


def test_axes_by_name_or_in_a_list() -> None:
    axes = {"x": {0: "batch", -1: "width"}, "y": [1], "z": {0: "batch"}}
    assert dynamic_shapes(["x", "y"], [X, X], axes, ["z"]) == ({0: "batch", 2: "width"}, {1: "y_1"})
    assert dynamic_shapes(["x"], [X], {}, []) == ({},)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"z": {0: "n"}}, "dynamic_axes names z; the inputs are x"),
        ({"x": {3: "n"}}, r"dynamic_axes\['x'\] has axis 3, and x has shape \(2, 3, 4\)"),
        ({"x": [-4]}, "has axis -4"),
        ({"x": {"0": "n"}}, "has axis '0'"),
    ],
    ids=["unknown_name", "beyond", "before", "no_number"],
)
def test_axes_that_are_not_there(axes: Any, message: str) -> None:
    with pytest.raises(DeploymentError, match=message):
        dynamic_shapes(["x"], [X], axes, ["y"])


def test_values_inside_make_room() -> None:
    x = ir.Value(name="x")
    weight = ir.Value(name="image", const_value=ir.tensor([1.0], name="image"))
    product = ir.node("Mul", [x, weight], name="mul")
    product.outputs[0].name = "scores"
    total = ir.node("Add", [product.outputs[0], x], name="add")
    total.outputs[0].name = "image_"
    graph = ir.Graph([x], [total.outputs[0]], nodes=[product, total], initializers=[weight], opset_imports={"": 21})
    rename_ports(ir.Model(graph, ir_version=10), ["image"], ["scores"])
    names = [x.name, total.outputs[0].name, weight.name, product.outputs[0].name]
    assert names[:2] == ["image", "scores"]
    assert len(set(names)) == 4
    assert list(graph.initializers) == [weight.name]
