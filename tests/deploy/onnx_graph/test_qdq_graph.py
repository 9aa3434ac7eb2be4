"""The view of an ONNX graph: constants, quantizations, readers."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper  # noqa: E402

from sparsebit.deploy.onnx_graph.qdq_graph import Graph, load_model, opset  # noqa: E402
from sparsebit.errors import DeploymentError  # noqa: E402
from tests.deploy.tiny_files import Tiny  # noqa: E402


def test_quantization_of_activation_and_weight() -> None:
    t = Tiny()
    graph = Graph(t.model(t.conv(t.quantized("x", 3, scale=0.5))))
    conv = graph.nodes[-1]
    data, weight = (graph.dequantized(name) for name in conv.input[:2])
    assert data is not None and weight is not None
    assert (data.dtype, float(data.scale), int(data.zero_point), data.per_tensor) == ("uint8", 0.5, 3, True)
    assert (weight.dtype, weight.scale.shape, weight.axis, weight.symmetric) == ("int8", (8,), 0, True)
    assert not data.symmetric and not graph.is_weight(conv.input[0]) and graph.is_weight(conv.input[1])


def test_looks_through_what_only_moves_elements() -> None:
    t = Tiny((2, 64))
    turned = t.node("Transpose", [t.quantized("x")], "turn", perm=[1, 0])
    y = t.node("Reshape", [t.node("Softmax", [turned], "softmax"), t.constant("shape", np.array([-1]))], "flat")
    graph = Graph(t.model(t.quantized(y)))
    assert graph.dequantized(turned) is not None and graph.dequantized("softmax_out") is None
    assert [node.op_type for node in graph.behind("softmax_out")] == ["QuantizeLinear"]
    assert not graph.reaches_output("softmax_out")


def test_type_without_a_zero_point() -> None:
    t = Tiny((2, 64))
    scale = t.constant("s", np.float32(1))
    q = t.node("QuantizeLinear", ["x", scale], "q", output_dtype=TensorProto.INT8)
    default = t.node("QuantizeLinear", ["x", scale], "default")
    dq = t.node("DequantizeLinear", [q, scale], "dq")
    graph = Graph(t.model(dq, t.node("DequantizeLinear", [default, scale], "dq2")))
    types = {node.name: graph.quantization(node).dtype for node in graph.nodes}
    assert types == {"q": "int8", "dq": "int8", "default": "uint8", "dq2": "uint8"}


def test_constant_nodes_count_as_stored() -> None:
    t = Tiny((2, 64))
    value = t.node("Constant", [], "seven", value=helper.make_tensor("v", TensorProto.FLOAT, [], [7.0]))
    graph = Graph(t.model(t.node("Mul", ["x", t.node("Identity", [value], "copy")], "mul")))
    assert float(graph.constant("copy_out")) == 7 and graph.constant("x") is None


def test_same_grid() -> None:
    t = Tiny()
    values = [t.quantized("x"), t.quantized("x"), t.quantized("x", scale=0.05), t.quantized("x", 0, np.int8)]
    graph = Graph(t.model(*values))
    first, *others = (graph.dequantized(value) for value in values)
    assert first is not None
    assert [other is not None and first.same_grid(other) for other in others] == [True, False, False]


def test_unread_nodes_are_left_out() -> None:
    t = Tiny()
    t.node("Relu", ["x"], "unread")
    graph = Graph(t.model(t.node("Sigmoid", ["x"], "read")))
    assert [node.name for node in graph.nodes] == ["read"] and len(graph.readers["x"]) == 1


def test_loading(tmp_path: Path) -> None:
    t = Tiny()
    model = load_model(t.save(tmp_path / "m.onnx", t.node("Relu", ["x"], "relu")))
    assert opset(model) == 21 and load_model(model) is model
    (tmp_path / "empty.onnx").write_bytes(b"")
    with pytest.raises(DeploymentError, match=r"empty\.onnx is not an ONNX file, or holds no node"):
        load_model(tmp_path / "empty.onnx")


def test_damaged_files_are_told(tmp_path: Path) -> None:
    """Whatever is cut off or changed: an error of ours, or a file that loads."""
    t = Tiny()
    file = t.save(tmp_path / "m.onnx", t.conv(t.quantized("x")))
    whole = file.read_bytes()
    random = np.random.default_rng(0)
    for place in [0, 1, 10, *(int(n) for n in random.integers(0, len(whole), 30))]:
        file.write_bytes(whole[:place])
        with contextlib.suppress(DeploymentError):
            load_model(file)
    model = onnx.load_from_string(whole)
    model.graph.initializer[0].raw_data = model.graph.initializer[0].raw_data + b"more"
    onnx.save(model, file)
    with pytest.raises(DeploymentError, match=r"m\.onnx is damaged: its tensor .* bytes, not"):
        load_model(file)
    model.graph.initializer[0].dims[:] = [-3]
    onnx.save(model, file)
    with pytest.raises(DeploymentError, match="is damaged"):
        load_model(file)
