"""Inputs made up from what a file says of them."""

from __future__ import annotations

from typing import Any

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("onnx")

from onnx import TensorProto, helper  # noqa: E402

from sparsebit.deploy.sessions.random_inputs import made_up_feeds  # noqa: E402
from sparsebit.errors import DeploymentError  # noqa: E402


def model(**inputs: tuple[int, tuple[int | str | None, ...]]) -> Any:
    values = [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()]
    return helper.make_model(helper.make_graph([], "inputs", values, []))


def test_open_dimensions() -> None:
    found = model(
        image=(TensorProto.FLOAT, ("n", 3, "h", "w")),
        tokens=(TensorProto.INT64, (None, "length")),
        states=(TensorProto.FLOAT16, ("length", "batch_size", 8)),
        fixed=(TensorProto.DOUBLE, (2, 5)),
    )
    arrays, words = made_up_feeds(found)
    assert words == {
        "image": "float32 1x3x224x224, random normal",
        "tokens": "int64 1x64, zeros",
        "states": "float16 1x1x8, random normal",
        "fixed": "float64 2x5, random normal",
    }
    assert {name: array.shape for name, array in arrays.items()}["image"] == (1, 3, 224, 224)


def test_masks_and_booleans_are_ones() -> None:
    found = model(attention_mask=(TensorProto.INT64, (1, 4)), flag=(TensorProto.BOOL, ()))
    arrays, words = made_up_feeds(found)
    assert arrays["attention_mask"].all() and arrays["flag"].all()
    assert words["flag"] == "bool scalar, ones"


def test_given_ones_win() -> None:
    x = np.full((1, 2), 7, np.float32)
    arrays, words = made_up_feeds(model(x=(TensorProto.FLOAT, (1, 2))), feeds={"x": x})
    assert arrays["x"] is x and words["x"] == "float32 1x2, given"


def test_shapes() -> None:
    found = model(x=(TensorProto.FLOAT, ("n", 3, "h", "w")))
    assert made_up_feeds(found, shapes={"x": (2, 3, 8, 8)})[0]["x"].shape == (2, 3, 8, 8)


@pytest.mark.parametrize("shape", [(1, 4, 8, 8), (1, 3, 8)])
def test_shape_that_does_not_fit(shape: tuple[int, ...]) -> None:
    with pytest.raises(DeploymentError, match="the file takes nx3xhxw"):
        made_up_feeds(model(x=(TensorProto.FLOAT, ("n", 3, "h", "w"))), shapes={"x": shape})


@pytest.mark.parametrize("option", ["feeds", "shapes"])
def test_unknown_name(option: str) -> None:
    with pytest.raises(DeploymentError, match="input 'y': the file has none of this name; it has x"):
        made_up_feeds(model(x=(TensorProto.FLOAT, (1,))), **{option: {"y": (1,)}})


def test_type_that_cannot_be_made_up() -> None:
    with pytest.raises(DeploymentError, match="input 'text' is of type string: pass your own array"):
        made_up_feeds(model(text=(TensorProto.STRING, (1,))))


def test_no_array_is_made_of_what_no_memory_holds() -> None:
    with pytest.raises(DeploymentError, match=r"input 'x' of shape 2147483648x8: 17179869184 numbers, and at most"):
        made_up_feeds(model(x=(TensorProto.FLOAT, (2**31, 8))))
