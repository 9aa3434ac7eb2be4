"""What the comparison with ONNX Runtime sees: small channels, integers, types, and sizes other than the example's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from onnx import TensorProto, helper

from sparsebit.deploy.loading.building.call import Call
from sparsebit.deploy.loading.building.operator_table import OPERATORS, OperatorRow
from sparsebit.deploy.loading.building.values import example_of
from sparsebit.deploy.loading.compare import difference
from sparsebit.errors import DeploymentError
from tests.deploy.loading.test_load_onnx import loaded, made, node


def replaced(monkeypatch: pytest.MonkeyPatch, name: str, build: Any) -> None:
    monkeypatch.setitem(OPERATORS, ("", name), [OperatorRow(name, "", 11, 26, build)])


def test_difference() -> None:
    one = numpy.array([0.0, 10.0, numpy.nan, numpy.inf], "float32")
    assert difference(one, one) == 0.0
    assert difference(one, one + numpy.array([0, 1, 0, 0], "float32")) == pytest.approx(0.1)
    assert numpy.isnan(difference(one, numpy.nan_to_num(one)))
    assert difference(numpy.zeros(0, "float32"), numpy.zeros(0, "float32")) == 0.0
    many = numpy.arange(2000)
    few = many.copy()
    few[0] = -1
    assert difference(many, few) == 0.0 and difference(many[:10], few[:10]) == 1.0


def test_scores_next_to_coordinates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of 0.02 in a probability is 1e-5 of an output that also holds coordinates up to 2,000."""
    nodes = [node("Mul", "x k", "a"), node("Sigmoid", "x", "b"), node("Concat", "a b", axis=1)]
    model = made(nodes, {"k": torch.tensor(3200.0)}, shape=["n", 4])
    loaded(model, tmp_path)
    replaced(monkeypatch, "Sigmoid", lambda call: call.emit(torch.nn.functional.hardsigmoid, call.inputs[0]))
    with pytest.raises(DeploymentError, match=r"in place . of axis 1, whose numbers are smaller"):
        loaded(model, tmp_path)


def with_integers(model: Any) -> Any:
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.INT64
    return model


def test_integers_and_their_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_integers(made([node("ArgMax", "x", axis=1)], {}, shape=["n", 9]))
    loaded(model, tmp_path)
    replaced(monkeypatch, "ArgMax", lambda call: call.emit(torch.argmin, call.inputs[0], 1, keepdim=True))
    with pytest.raises(DeploymentError, match=r"differs from ONNX Runtime's by 1.0e\+00"):
        loaded(model, tmp_path)
    replaced(monkeypatch, "ArgMax", lambda call: call.emit(torch.amax, call.inputs[0], 1, keepdim=True))
    with pytest.raises(DeploymentError, match="in type: float32, not int64"):
        loaded(model, tmp_path)


@pytest.mark.parametrize(("shape", "axis"), [(["n", 4], "axis 0 of input x is 2, not 1"), ([3, "w"], "axis 1 of inp")])
def test_other_sizes_are_compared(shape: list[Any], axis: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def frozen(call: Call) -> Any:
        return call.method("reshape", call.emit(torch.relu, call.inputs[0]), tuple(example_of(call.inputs[0]).shape))

    replaced(monkeypatch, "Relu", frozen)
    with pytest.raises(DeploymentError, match=rf"{axis}.*make_dynamic_shape_fixed --input_name x --input_shape"):
        loaded(made([node("Relu", "x")], {}, shape=shape), tmp_path, [torch.randn(1 if axis[5] == "0" else 3, 4)])


def test_a_size_that_the_file_cannot_take_is_left_out(tmp_path: Path) -> None:
    model = made([node("Reshape", "x s")], {"s": torch.tensor([2, 2])}, shape=["n", 4])
    assert loaded(model, tmp_path)(torch.arange(4.0)[None]).shape == (2, 2)


def test_axes_of_one_name_change_together(tmp_path: Path) -> None:
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", "t"]) for name in ("x", "z")]
    model = made([node("Add", "x z")], {}, shape=["n", "t"])
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    assert loaded(model, tmp_path)(torch.ones(3, 5), torch.ones(3, 5)).shape == (3, 5)


def test_random_token_numbers_reach_other_rows_than_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Integers that are made up are 0 first; a rule that reads the first row alone is found with others."""
    model = made([node("Gather", "w x")], {"w": torch.randn(200, 4)}, shape=["n", 5])
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    loaded(model, tmp_path)

    def first_row(call: Call) -> Any:
        zeros = call.emit(torch.zeros_like, call.inputs[1])
        return call.emit(torch.nn.functional.embedding, zeros, call.inputs[0])

    replaced(monkeypatch, "Gather", first_row)
    with pytest.raises(DeploymentError, match="output y differs"):
        loaded(model, tmp_path)
