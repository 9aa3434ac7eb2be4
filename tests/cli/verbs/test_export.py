"""`sparsebit export` and `check --model`: a file made from a saved folder or a float model, and compared with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.cli.conftest import Sparsebit

pytest.importorskip("onnxruntime")

NET = ("-m", "own_project:Net")


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture
def folder(sparsebit: Sparsebit, project: Path) -> Path:
    """A quantized model in `quantized`, and data in `data.npz`."""
    np.savez("data.npz", x=np.random.default_rng(0).standard_normal((6, 3, 8, 8)).astype(np.float32))
    answer = sparsebit("quantize", *NET, "-d", "data.npz", "-o", "quantized", "-q")
    assert answer.code == 0, answer.err
    return project


@pytest.mark.exact_sums
def test_a_saved_model_and_its_file(sparsebit: Sparsebit, folder: Path) -> None:
    made = sparsebit("export", "quantized", *NET, "-d", "data.npz", "-o", "net.onnx", "--dynamic-batch", "--json")
    assert made.json["onnx"]["parity"]["is_exact"] and Path("net.onnx").is_file()
    source = ("check", "net.onnx", *NET, "-d", "data.npz")
    answer = sparsebit(*source, "--against", "quantized", "--exact")
    assert answer.code == 0 and "bit-exact in onnxruntime against the simulation" in words(answer.out)
    assert "against the float model" in words(sparsebit(*source).out)
    answer = sparsebit(*source, "--min-sqnr", "90")
    assert answer.code == 1 and "dB against the float model; 90.0 dB is required" in words(answer.err)
    answer = sparsebit("check", "net.onnx", "-d", "data.npz")
    assert "It was compared with itself only" in words(answer.out)

    model = onnx.load("net.onnx")
    (codes,) = (tensor for tensor in model.graph.initializer if tensor.name == "head.weight/codes")
    array = onnx.numpy_helper.to_array(codes).copy()
    array[0, 0] -= 1 if array[0, 0] > 0 else -1
    codes.CopyFrom(onnx.numpy_helper.from_array(array, codes.name))
    onnx.save(model, "changed.onnx")
    changed = ("check", "changed.onnx", "-d", "data.npz")
    assert sparsebit(*changed).code == 0  # the runtime does compute what the changed file says
    answer = sparsebit(*changed, *NET, "--against", "quantized")
    assert answer.code == 1 and "does not compute what was simulated" in answer.err


def test_a_float_model(sparsebit: Sparsebit, project: Path) -> None:
    answer = sparsebit("export", *NET, "--size", "8", "-o", "float.onnx", "--dynamic-batch")
    assert answer.code == 0, answer.err
    assert "not compared with the model: no --data" in answer.err
    graph = onnx.load("float.onnx").graph
    assert graph.input[0].name == "x" and graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert not any("Quantize" in node.op_type for node in graph.node)
    np.savez("data.npz", x=np.random.default_rng(0).standard_normal((3, 3, 8, 8)).astype(np.float32))
    answer = sparsebit("check", "float.onnx", *NET, "-d", "data.npz", "--min-sqnr", "100")
    assert answer.code == 0, answer.err


SENSELESS = [
    (("export", *NET, "-o", "f.onnx"), "how is the model called?"),
    (("export", *NET, "--size", "8", "-o", "f.onnx", "--exact"), "--exact: nothing is compared without --data"),
    (("export", "quantized", *NET, "-w", "w.pt", "-o", "f.onnx"), "--weights: quantized holds the weights"),
    (("export", *NET, "--size", "8", "-o", "f.onnx", "--extra-info"), "a float model has no quantized sites"),
    (("check", "f.onnx", "-d", "d.npz", "--against", "."), "name the model that it was saved from"),
    (("quantize", *NET, "-d", "d.npz", "-o", "f.onnx", "--no-check", "--exact"), "--no-check compares nothing"),
    (("quantize", *NET, "-d", "d.npz", "-o", "folder", "--min-sqnr", "40"), "--min-sqnr need an --output"),
]


@pytest.mark.parametrize(("arguments", "said"), SENSELESS, ids=[f"{line[0][0]}-{line[1]}" for line in SENSELESS])
def test_command_lines_without_sense(
    arguments: tuple[str, ...], said: str, sparsebit: Sparsebit, project: Path
) -> None:
    node = onnx.helper.make_node("Relu", ["x"], ["y"])
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([node], "g", [], [])), "f.onnx")
    answer = sparsebit(*arguments)
    assert answer.code == 2, answer.err
    assert said in words(answer.err.replace("│", ""))
