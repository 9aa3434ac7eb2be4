"""Files that are refused: quantized, with subgraphs, with unknown operators, damaged, or hostile."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from sparsebit.deploy.loading.load_onnx import load_onnx
from sparsebit.errors import DeploymentError
from tests.deploy.loading.test_load_onnx import made, node


def refused(model: Any, folder: Path) -> str:
    file = folder / "made.onnx"
    file.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    with pytest.raises(DeploymentError) as caught:
        load_onnx(file)
    return str(caught.value)


def test_quantized_files(tmp_path: Path) -> None:
    q = node("QuantizeLinear", "x s", "q")
    text = refused(made([q, node("DequantizeLinear", "q s")], {"s": torch.tensor(0.1)}, shape=[1, 4]), tmp_path)
    assert "quantized already" in text and "Give the float file" in text and "n_QuantizeLinear" in text
    text = refused(made([node("QLinearSigmoid", "x")], {}, shape=[1, 4]), tmp_path)
    assert "QLinearSigmoid" in text


def test_subgraphs_are_named(tmp_path: Path) -> None:
    y = helper.make_tensor_value_info("z", TensorProto.FLOAT, None)
    branch = helper.make_graph([helper.make_node("Relu", ["x"], ["z"])], "b", [], [y])
    choice = node("If", "c", "y", then_branch=branch, else_branch=branch)
    text = refused(made([choice], {"c": torch.tensor(True)}, shape=[1, 4]), tmp_path)
    assert "subgraphs" in text and "'n_If' (If)" in text


def test_all_unknown_operators_are_listed(tmp_path: Path) -> None:
    nodes = [node("Foo", "x", "a"), node("Bar", "a", "b"), node("Foo", "b", "y")]
    text = refused(made(nodes, {}, shape=[1, 4]), tmp_path)
    assert "Bar: 'n_Bar'" in text and "Foo: 'n_Foo', 'n_Foo'" in text


@pytest.mark.parametrize("opset", [9, 30])
def test_other_opsets(opset: int, tmp_path: Path) -> None:
    text = refused(made([node("Relu", "x")], {}, shape=[1, 4], opset=opset), tmp_path)
    assert f"opset {opset}; allowed: 11 to 26" in text and "convert_version" in text


def whole() -> bytes:
    return made([node("MatMul", "x w")], {"w": torch.randn(4, 4)}, shape=[1, 4]).SerializeToString()


DAMAGED: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "is not an ONNX file"),
    "text": (lambda: b"hello, this is no protobuf" * 10, "is not an ONNX file"),
    "truncated": (lambda: whole()[:-40], "is not an ONNX file|truncated|damaged"),
    "deep": (lambda: b"\x3a\x80\x80\x80\x80\x10" * 2000, "is not an ONNX file"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files(name: str, tmp_path: Path) -> None:
    content, message = DAMAGED[name]
    file = tmp_path / "made.onnx"
    file.write_bytes(content())
    with pytest.raises(DeploymentError, match=message):
        load_onnx(file)


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match="no such file"):
        load_onnx(tmp_path / "absent.onnx")
    with pytest.raises(DeploymentError, match="is a folder"):
        load_onnx(tmp_path)


def test_a_tensor_of_another_size(tmp_path: Path) -> None:
    model = made([node("MatMul", "x w")], {"w": torch.randn(4, 4)}, shape=[1, 4])
    model.graph.initializer[0].dims[0] = 5
    assert "has 64 bytes, not 80" in refused(model, tmp_path)
    model.graph.initializer[0].dims[:] = [1 << 40, 1 << 40]
    assert "impossible size" in refused(model, tmp_path)


def external(location: str, **entries: str) -> onnx.ModelProto:
    model = made([node("MatMul", "x w")], {"w": torch.randn(4, 4)}, shape=[1, 4])
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=value)
    return model


def test_external_data(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    weight = torch.randn(4, 4)
    (folder / "w.bin").write_bytes(b"\0" * 8 + weight.numpy().tobytes())
    onnx.save(external("w.bin", offset="8", length="64"), folder / "made.onnx")
    assert torch.equal(next(load_onnx(folder / "made.onnx").parameters()).t(), weight)
    assert "which has 72" in refused(external("w.bin", offset="16", length="64"), folder)
    assert "names 8 bytes" in refused(external("w.bin", length="8"), folder)
    assert "from byte -4" in refused(external("w.bin", offset="-4"), folder)
    assert "is not a number" in refused(external("w.bin", offset="x"), folder)
    assert "has no such file" in refused(external("absent.bin"), folder)


def test_external_data_outside_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    secret = tmp_path / "secret.bin"
    secret.write_bytes(b"\0" * 64)
    os.symlink(secret, folder / "link.bin")
    for location in ("../secret.bin", str(secret), "link.bin", "", "C:/secret.bin"):
        assert "outside of the model's folder" in refused(external(location), folder), location


def function(name: str, calls: list[str]) -> Any:
    steps = [helper.make_node(call, [f"v{i}"], [f"v{i + 1}"], domain="own") for i, call in enumerate(calls)]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    return helper.make_function("own", name, ["v0"], [f"v{len(calls)}"], steps, opsets)


def with_functions(functions: list[Any]) -> onnx.ModelProto:
    model = made([helper.make_node("F0", ["x"], ["y"], domain="own")], {}, shape=[1, 4])
    model.opset_import.append(helper.make_opsetid("own", 1))
    model.functions.extend(functions)
    return model


def test_functions_without_end(tmp_path: Path) -> None:
    assert "call themselves" in refused(with_functions([function("F0", ["F0"])]), tmp_path)
    bomb = [function(f"F{depth}", [f"F{depth + 1}"] * 10) for depth in range(12)] + [function("F12", ["F12x"])]
    assert "unfolds to" in refused(with_functions(bomb), tmp_path)


def test_a_constant_that_no_machine_holds(tmp_path: Path) -> None:
    nodes = [node("ConstantOfShape", "s", "c"), node("ReduceSum", "c", "d", keepdims=0), node("Add", "x d")]
    text = refused(made(nodes, {"s": torch.tensor([1 << 20, 1 << 20])}, shape=[1, 4]), tmp_path)
    assert "Failed to allocate" in text or "at most" in text or "does not load" in text


def test_a_node_that_reads_what_is_not_there(tmp_path: Path) -> None:
    text = refused(made([node("Add", "x absent")], {}, shape=[1, 4]), tmp_path)
    assert "absent" in text


def test_numpy_helper_is_used_for_typed_data(tmp_path: Path) -> None:
    """Tensors without raw data hold a list of numbers, which may be too short."""
    model = made([node("MatMul", "x w")], {}, shape=[1, 4])
    model.graph.initializer.append(helper.make_tensor("w", TensorProto.FLOAT, [4, 4], [0.5] * 16))
    assert numpy_helper.to_array(model.graph.initializer[0]).shape == (4, 4)
    del model.graph.initializer[0].float_data[10:]
    assert "w" in refused(model, tmp_path)
