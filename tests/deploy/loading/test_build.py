"""Graphs of unusual shape: names that Python has taken, inputs that are constants, outputs that are inputs, types."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from sparsebit.errors import DeploymentError
from tests.deploy.loading.test_load_onnx import loaded, made, node


def info(name: str, shape: list[Any] | None = None, kind: int = TensorProto.FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def renamed(model: Any, inputs: list[Any], outputs: list[Any]) -> Any:
    for field, values in ((model.graph.input, inputs), (model.graph.output, outputs)):
        del field[:]
        field.extend(values)
    return model


@pytest.mark.parametrize("name", ["class", "1", "self", "a b", "x:0", "é", "torch", "getattr", "None", "x" * 3000])
def test_names_of_inputs(name: str, tmp_path: Path) -> None:
    model = made([helper.make_node("Relu", [name], ["y"])], {}, shape=["n", 4])
    found = loaded(renamed(model, [info(name, ["n", 4])], [info("y")]), tmp_path)
    torch.testing.assert_close(found(-torch.ones(2, 4)), torch.zeros(2, 4))


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("_fc.weight", "_fc"), ("a.b.weight", "a.b"), ("forward.weight", "forward_"), ("class.weight", "class_"),
        ("training.0.weight", "training_.0"), ("code.weight", "code_"), ("__class__.weight", "__class___"),
        ("é.weight", "_"), ("recompile.weight", "recompile_"),
    ],
)  # fmt: skip
def test_names_of_layers(name: str, path: str, tmp_path: Path) -> None:
    """The matrix is a layer's, and a function reads it too."""
    nodes = [helper.make_node("MatMul", ["x", name], ["a"]), helper.make_node("Mul", ["a", name], ["y"])]
    module = loaded(made(nodes, {name: torch.randn(4, 4)}, shape=[4, 4]), tmp_path)
    assert isinstance(module.get_submodule(path), nn.Linear)
    again = pickle.loads(pickle.dumps(copy.deepcopy(module)))
    again.load_state_dict(module.state_dict())
    x = torch.randn(4, 4)
    assert torch.equal(again(x), module(x))


def test_outputs_that_nothing_computes(tmp_path: Path) -> None:
    """An input, a stored tensor, and a size are outputs."""
    nodes = [node("Relu", "x", "y"), node("Shape", "x", "s")]
    model = renamed(
        made(nodes, {"w": torch.arange(3.0)}, shape=["n", 4]),
        [info("x", ["n", 4])],
        [info("x", ["n", 4]), info("w", [3]), info("s", [2], TensorProto.INT64), info("y")],
    )
    x = torch.randn(5, 4)
    same, stored, shape, y = loaded(model, tmp_path)(x)
    assert torch.equal(same, x) and stored.tolist() == [0, 1, 2] and shape.tolist() == [5, 4]
    assert torch.equal(y, x.relu())


def test_a_stored_tensor_that_is_an_input_too_is_a_constant(tmp_path: Path) -> None:
    model = made([node("MatMul", "x w")], {"w": torch.randn(4, 3)}, shape=["n", 4])
    module = loaded(renamed(model, [info("x", ["n", 4]), info("w", [4, 3])], [info("y")]), tmp_path)
    assert module(torch.randn(2, 4)).shape == (2, 3) and len(list(module.parameters())) == 1


def test_sizes_that_the_file_says_of_inner_values_are_not_believed(tmp_path: Path) -> None:
    """As in a file whose input was made dynamic by hand: the values after it are still of one sample."""
    nodes = [
        node("Relu", "x", "r"), node("Shape", "r", "s"), node("Gather", "s zero", "n"),
        node("Concat", "n rest", "t", axis=0), node("Reshape", "r t"),
    ]  # fmt: skip
    constants = {"zero": torch.tensor([0]), "rest": torch.tensor([2, 2])}
    model = made(nodes, constants, shape=["n", 4])
    model.graph.value_info.append(info("r", [1, 4]))
    renamed(model, [info("x", ["n", 4])], [info("y", [1, 2, 2])])
    assert loaded(model, tmp_path)(torch.randn(3, 4)).shape == (3, 2, 2)


@pytest.mark.parametrize(("kind", "dtype"), [(TensorProto.FLOAT16, "float16"), (TensorProto.DOUBLE, "float64")])
def test_types_of_floats(kind: int, dtype: str, tmp_path: Path) -> None:
    model = made([node("MatMul", "x w", "a"), node("Softmax", "a")], {}, shape=["n", 8])
    weight = numpy.random.default_rng(0).standard_normal((8, 8)).astype(dtype)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    module = loaded(renamed(model, [info("x", ["n", 8], kind)], [info("y", None, kind)]), tmp_path)
    assert str(module(torch.from_numpy(weight)).dtype) == f"torch.{dtype}"


def test_in_training_mode_norms_learn_their_statistics(tmp_path: Path) -> None:
    constants = {"s": torch.ones(4), "b": torch.zeros(4), "m": torch.zeros(4), "v": torch.ones(4)}
    module = loaded(made([node("BatchNormalization", "x s b m v")], constants, shape=["n", 4, 2, 2]), tmp_path)
    assert not module.training
    module.train()(torch.randn(8, 4, 2, 2) + 3).sum().backward()
    (norm,) = (m for m in module.modules() if isinstance(m, nn.BatchNorm2d))
    assert norm.running_mean is not None and norm.running_mean.mean() > 0.2 and norm.weight.grad is not None


@pytest.mark.parametrize(
    ("nodes", "constants", "message"),
    [
        ([node("Dropout", "x r t")], {"r": 0.5, "t": True}, "exported in training mode"),
        ([node("Dropout", "x", "z m"), node("Relu", "m", "y")], {}, "m|bool"),
        ([node("ReduceSum", "x x")], {}, "x|axes"),
        ([node("Resize", "x", mode="nearest")], {}, "Resize"),
        ([node("Shape", "x", "s"), node("ReduceLogSumExp", "s")], {}, "on torch.int64|does not load"),
        (
            [node("Slice", "x a b c d", "s"), node("Relu", "s")],
            {"a": torch.tensor([2]), "b": torch.tensor([0]), "c": torch.tensor([1]), "d": torch.tensor([-1])},
            "leaves open",
        ),
    ],
    ids=["dropout", "mask", "axes", "resize", "integers", "backwards"],
)
def test_nodes_without_a_rule(nodes: list[Any], constants: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match=message):
        loaded(made(nodes, constants, shape=[1, "t", 4]), tmp_path)
