"""`audit`: real files in real runtimes; what runs in integers, what does not, sizes, the float side."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

np = pytest.importorskip("numpy")
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from sparsebit.deploy.audit.audit_file import audit  # noqa: E402
from sparsebit.errors import DeploymentError, MissingExtraError  # noqa: E402
from tests.deploy.tiny_files import Tiny  # noqa: E402


def residual_net(*, quantized_add: bool) -> tuple[Tiny, str]:
    """Two convolutions, an add around the second, a pool and a linear layer."""
    t = Tiny()
    x = t.quantized("x")
    first = t.quantized(t.node("Relu", [t.conv(x, "first")], "relu"), 0)
    second = t.conv(first, "second")
    add = t.node("Add", [t.quantized(second) if quantized_add else second, first], "add")
    pooled = t.quantized(t.node("GlobalAveragePool", [t.quantized(add)], "pool"))
    flat = t.node("Reshape", [pooled, t.constant("shape", np.array([1, 8]))], "flat")
    return t, t.node("Gemm", [flat, t.weight("w", (4, 8)), t.bias("b", 4)], "fc", transB=1)


@pytest.fixture
def fused(tmp_path: Path) -> Path:
    tiny, output = residual_net(quantized_add=True)
    return tiny.save(tmp_path / "fused.onnx", output)


@pytest.fixture
def unfused(tmp_path: Path) -> Path:
    tiny, output = residual_net(quantized_add=False)
    return tiny.save(tmp_path / "unfused.onnx", output)


def arithmetic(file: Path, **options: Any) -> dict[str, str]:
    return {layer.name: layer.arithmetic for layer in audit(file, repeats=0, **options).layers}


class TestOnnxRuntime:
    def test_everything_in_integers(self, fused: Path) -> None:
        found = audit(fused, repeats=0)
        assert {layer.name: (layer.arithmetic, layer.kernel) for layer in found.layers} == {
            "first": ("integer", "QLinearConv"),
            "second": ("integer", "QLinearConv"),
            "add": ("integer", "QLinearAdd"),
            "pool": ("integer", "QLinearGlobalAveragePool"),
            "fc": ("integer", "QGemm"),
        }
        assert found.leftovers == {"QuantizeLinear": 1}
        assert found.verdict == "All 2 convolutions and 1 linear layer run in integers"
        assert found.counts() == {"integer": 3} and found.ratio is None

    def test_float_add_takes_the_convolution_with_it(self, unfused: Path) -> None:
        found = audit(unfused, repeats=0)
        assert {layer.name for layer in found.layers if layer.arithmetic == "float"} == {"second", "add"}
        assert found.verdict.startswith(
            "1 of 2 convolutions is not in integers, because its output is read by a float add"
        )
        assert "A.QADD.ENABLE_QUANT" in found.verdict and found.leftovers["DequantizeLinear"] >= 2
        assert [layer.name for group in found.groups() for layer in group] == ["second", "add"]

    def test_products(self, tmp_path: Path) -> None:
        t = Tiny((1, 4, 16))
        x = t.quantized("x")
        turned = t.node("Transpose", [x], "turn", perm=[0, 2, 1])
        scores = t.node("MatMul", [x, t.quantized(turned)], "attention")
        wide = t.node("MatMul", [x, t.weight("w", (16, 16), axis=1)], "linear")
        only = t.node("MatMul", [wide, t.weight("v", (16, 16), axis=1)], "weight_only")
        file = t.save(tmp_path / "products.onnx", scores, only)
        assert arithmetic(file) == {"attention": "integer", "linear": "integer", "weight_only": "weight-only"}

    @pytest.mark.parametrize("op", ["Concat", "Mul", "AveragePool", "MaxPool", "Resize"])
    def test_light_layers(self, tmp_path: Path, op: str) -> None:
        t = Tiny()
        x = t.quantized("x")
        inputs = {
            "Concat": [x, t.quantized("x", scale=0.05)],
            "Mul": [x, t.quantized("x", scale=0.05)],
            "Resize": [x, "", t.constant("scales", np.array([1, 1, 2, 2], np.float32))],
        }
        attributes = {
            "Concat": {"axis": 1},
            "AveragePool": {"kernel_shape": [2, 2]},
            "MaxPool": {"kernel_shape": [2, 2]},
        }
        y = t.node(op, inputs.get(op, [x]), "layer", **attributes.get(op, {}))
        assert arithmetic(t.save(tmp_path / "light.onnx", t.quantized(y))) == {"layer": "integer"}

    def test_pool_between_convolutions(self, tmp_path: Path) -> None:
        """On ARM the three run channels-last, with names and values of the runtime's own in between."""
        t = Tiny()
        y = t.quantized(t.conv(t.quantized("x"), "first"), 0)
        y = t.quantized(t.node("MaxPool", [y], "pool", kernel_shape=[2, 2]), 0)
        file = t.save(tmp_path / "pool.onnx", t.quantized(t.conv(y, "second")))
        assert arithmetic(file) == {"first": "integer", "pool": "integer", "second": "integer"}

    def test_nameless_nodes_are_found_by_their_outputs(self, fused: Path) -> None:
        model = onnx.load(fused)
        for node in model.graph.node:
            node.name = ""
        onnx.save(model, fused)
        assert set(arithmetic(fused).values()) == {"integer"}

    def test_unread_nodes_do_not_count(self, tmp_path: Path) -> None:
        t = Tiny()
        y = t.conv(t.quantized("x"))
        add = t.node("Add", [y, "x"], "add")
        t.quantized(y)  # nobody reads it
        (conv, _) = audit(t.save(tmp_path / "unread.onnx", add), repeats=0).layers
        assert conv.cause == "its output is read by a float add"

    def test_arithmetic_of_shapes_is_no_layer(self, tmp_path: Path) -> None:
        t = Tiny()
        shape = t.node("Shape", ["x"], "shape")
        double = t.node("Concat", [shape, shape], "cat", axis=0)
        total = t.node("Mul", [shape, shape], "mul")
        assert arithmetic(t.save(tmp_path / "shapes.onnx", double, total)) == {}

    def test_local_functions_are_looked_into(self, tmp_path: Path) -> None:
        from onnx import helper

        node = helper.make_node("MatMul", ["a", "b"], ["c"], name="product")
        product = helper.make_function("own", "Product", ["a", "b"], ["c"], [node], [helper.make_opsetid("", 21)])
        t = Tiny((2, 64))
        t.float_weight("w", (64, 16))
        t.nodes.append(helper.make_node("Product", ["x", "w"], ["y"], name="call", domain="own"))
        outputs = [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, (2, 16))]
        graph = helper.make_graph(t.nodes, "tiny", t.inputs, outputs, t.initializers)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
        onnx.save(
            helper.make_model(graph, functions=[product], opset_imports=opsets, ir_version=10), tmp_path / "f.onnx"
        )
        assert list(arithmetic(tmp_path / "f.onnx").values()) == ["float"]


class TestFilesOfOtherTools:
    @pytest.fixture
    def plain(self, tmp_path: Path) -> Path:
        t = Tiny(("batch", 3, 8, 8))
        y = t.node("Conv", ["x", t.float_weight("w", (8, 3, 3, 3)), t.float_weight("b", (8,))], "conv")
        y = t.node("Relu", [y], "relu")
        y = t.node("GlobalAveragePool", [y], "pool")
        y = t.node("Flatten", [y], "flat")
        return t.save(tmp_path / "plain.onnx", t.node("MatMul", [y, t.float_weight("v", (8, 4))], "product"))

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    @pytest.mark.parametrize("format_name", ["QDQ", "QOperator"])
    def test_onnxruntime_static(self, plain: Path, tmp_path: Path, format_name: str) -> None:
        from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

        class Reader(CalibrationDataReader):  # type: ignore[misc]
            def __init__(self) -> None:
                self.left = [{"x": np.random.default_rng(0).normal(size=(1, 3, 8, 8)).astype(np.float32)}]

            def get_next(self) -> Any:
                return self.left.pop() if self.left else None

        file = tmp_path / "static.onnx"
        quantize_static(plain, file, Reader(), quant_format=getattr(QuantFormat, format_name), per_channel=True)
        found = audit(file, against=plain, repeats=2)
        assert {layer.arithmetic for layer in found.heavy} == {"integer"}
        assert len(found.heavy) == 2 and found.float_source == str(plain)

    def test_onnxruntime_dynamic(self, plain: Path, tmp_path: Path) -> None:
        from onnxruntime.quantization import quantize_dynamic

        file = tmp_path / "dynamic.onnx"
        quantize_dynamic(plain, file, op_types_to_quantize=["MatMul"])
        found = audit(file, repeats=2)
        assert [(layer.kind, layer.arithmetic) for layer in found.heavy] == [
            ("convolution", "float"),
            ("matrix product", "integer"),
        ]
        assert found.float_source == "twin" and found.ratio is not None


class TestOpenVino:
    @pytest.fixture(autouse=True)
    def openvino(self) -> None:
        pytest.importorskip("openvino")

    def test_linear_layer_in_integers(self, tmp_path: Path) -> None:
        t = Tiny((2, 64))
        y = t.node("Gemm", [t.quantized("x"), t.weight("w", (16, 64)), t.bias("b", 16)], "fc", transB=1)
        found = audit(t.save(tmp_path / "fc.onnx", y), runtime="openvino", repeats=2)
        (layer,) = found.layers
        assert layer.arithmetic == "integer" and layer.kernel.startswith("FullyConnected")
        assert set(found.latency) == {"float", "quantized"} and found.runtime == "openvino"

    def test_every_layer_is_found(self, fused: Path) -> None:
        found = arithmetic(fused, runtime="openvino")
        assert set(found) == {"first", "second", "add", "pool", "fc"} and "unknown" not in found.values()
        assert found["fc"] == "integer"

    def test_missing_package(self, fused: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "openvino", None)
        with pytest.raises(MissingExtraError, match=r"pip install "):
            audit(fused, runtime="openvino")


class TestComparison:
    def test_with_the_twin(self, fused: Path) -> None:
        found = audit(fused, repeats=3)
        assert (
            found.float_source == "twin" and found.float_bytes is not None and found.num_bytes == fused.stat().st_size
        )
        assert found.latency["float"].num_rounds == found.latency["quantized"].num_rounds == 3
        assert found.ratio == found.latency["quantized"].cpu_ratio
        assert found.feeds == {"x": "float32 1x8x8x8, random normal"}
        assert " than float (" in found.verdict or "as float (" in found.verdict

    def test_several_threads_are_compared_by_the_wall(self, fused: Path) -> None:
        found = audit(fused, repeats=2, num_threads=2)
        assert found.ratio == found.latency["quantized"].wall_ratio

    def test_float_file_with_other_names(self, fused: Path, tmp_path: Path) -> None:
        from sparsebit.deploy.comparing.float_twin import float_twin

        twin = float_twin(fused)
        twin.graph.input[0].name = "image"
        for node in twin.graph.node:
            node.input[:] = ["image" if name == "x" else name for name in node.input]
        onnx.save(twin, tmp_path / "float.onnx")
        found = audit(fused, against=tmp_path / "float.onnx", repeats=1)
        assert found.float_bytes == (tmp_path / "float.onnx").stat().st_size

    def test_missing_float_file(self, fused: Path) -> None:
        with pytest.raises(DeploymentError, match=r"none\.onnx: no such file"):
            audit(fused, against="none.onnx", repeats=1)

    def test_external_data_counts(self, fused: Path, tmp_path: Path) -> None:
        model = onnx.load(fused)
        file = tmp_path / "split.onnx"
        onnx.save(model, file, save_as_external_data=True, location="weights.bin", size_threshold=100)
        assert audit(file, repeats=0).num_bytes == file.stat().st_size + (tmp_path / "weights.bin").stat().st_size

    def test_feeds_of_the_user(self, fused: Path) -> None:
        found = audit(fused, feeds={"x": np.zeros((1, 8, 8, 8), np.float32)}, repeats=1)
        assert found.feeds == {"x": "float32 1x8x8x8, given"}

    def test_record_goes_to_json(self, fused: Path) -> None:
        record = json.loads(json.dumps(audit(fused, repeats=1).to_dict()))
        assert record["layers"][0]["name"] == "first" and record["latency"]["float"]["wall_ms"] > 0
        assert record["counts"] == {"integer": 3}


class TestFaults:
    def test_no_such_file(self) -> None:
        with pytest.raises(DeploymentError, match=r"none\.onnx: no such file"):
            audit("none.onnx")

    def test_no_onnx_file(self, tmp_path: Path) -> None:
        (tmp_path / "text.onnx").write_text("this is no model")
        with pytest.raises(DeploymentError, match="is not an ONNX file"):
            audit(tmp_path / "text.onnx")

    def test_unknown_runtime(self, fused: Path) -> None:
        with pytest.raises(DeploymentError, match=r"runtime 'tensorrt'.*allowed: onnxruntime, openvino"):
            audit(fused, runtime="tensorrt")

    def test_missing_package(self, fused: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "onnx", None)
        with pytest.raises(MissingExtraError, match=r"pip install "):
            audit(fused)


def test_blocked_convolutions_of_x86_are_found_by_their_output() -> None:
    """ONNX Runtime calls them after what they make, as in its nchwc_transformer.cc; ARM has none, so by hand."""
    from sparsebit.deploy.audit.onnxruntime_graph import Finder
    from sparsebit.deploy.onnx_graph.qdq_graph import Graph

    t = Tiny()
    y = t.node("Relu", [t.conv("x")], "relu")
    graph = Graph(t.model(y))
    blocked = onnx.helper.make_node("Conv", ["x", "w"], ["a"], name="relu_out_nchwc", domain="com.microsoft.nchwc")
    reordered = onnx.helper.make_node("ReorderOutput", ["a"], ["relu_out"], name="ReorderOutput")
    optimized = Graph(
        onnx.helper.make_model(onnx.helper.make_graph([blocked, reordered], "optimized", [], graph.model.graph.output))
    )
    conv = next(node for node in graph.nodes if node.op_type == "Conv")
    assert Finder(graph, optimized).find(conv).name == "relu_out_nchwc"
