"""`float_twin`: it runs, holds no quantization, and agrees with the quantized file up to the activations' rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

np = pytest.importorskip("numpy")
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from sparsebit.deploy.comparing.float_twin import float_twin  # noqa: E402
from sparsebit.deploy.onnx_graph.dequantize import dequantize, unpack_matmul_nbits  # noqa: E402
from sparsebit.deploy.sessions.runtime_sessions import open_session  # noqa: E402
from sparsebit.errors import DeploymentError  # noqa: E402
from tests.deploy.tiny_files import Tiny  # noqa: E402


def outputs(model: Any, shape: tuple[int, ...]) -> list[Any]:
    session = open_session(model.SerializeToString(), num_threads=1, optimize=False)
    return session.run({"x": np.random.default_rng(1).normal(size=shape).astype(np.float32)})


def assert_near(quantized: Any, shape: tuple[int, ...], *, tolerance: float) -> Any:
    """The twin, which runs and differs from the quantized model by `tolerance` of the output's range at most."""
    twin = float_twin(quantized)
    assert not [node for node in twin.graph.node if "uantize" in node.op_type or node.op_type.startswith("Q")]
    for mine, theirs in zip(outputs(twin, shape), outputs(quantized, shape), strict=True):
        assert mine.dtype == np.float32
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=tolerance * np.ptp(theirs) + 1e-6)
    return twin


class TestQdq:
    def test_convolutions_with_a_residual_add(self) -> None:
        t = Tiny()
        x = t.quantized("x")
        first = t.quantized(t.node("Relu", [t.conv(x, "first")], "relu"), 0, scale=0.05)
        add = t.node("Add", [t.quantized(t.conv(first, "second"), scale=0.05), first], "add")
        twin = assert_near(t.model(t.quantized(add, scale=0.1)), (1, 8, 8, 8), tolerance=0.05)
        assert [node.op_type for node in twin.graph.node] == ["Conv", "Relu", "Conv", "Add", "Identity"]
        assert {tensor.data_type for tensor in twin.graph.initializer} == {TensorProto.FLOAT}

    def test_weights_alone_are_exact(self) -> None:
        t = Tiny()
        assert_near(t.model(t.conv("x")), (1, 8, 8, 8), tolerance=1e-6)

    def test_int32_bias(self) -> None:
        t = Tiny((2, 64))
        y = t.node("Gemm", ["x", t.weight("w", (16, 64)), t.bias("b", 16)], "fc", transB=1)
        assert_near(t.model(y), (2, 64), tolerance=1e-6)

    def test_float_weight_with_a_pair_on_it(self) -> None:
        t = Tiny()
        w = t.quantized(t.float_weight("w", (8, 8, 3, 3)), 0, np.int8, scale=0.004)
        twin = assert_near(t.model(t.node("Conv", ["x", w], "conv")), (1, 8, 8, 8), tolerance=0.02)
        assert [tensor.name for tensor in twin.graph.initializer] == ["w"]

    def test_integers_that_flow_through_a_pool(self) -> None:
        t = Tiny()
        parameters = [t.constant("scale", np.float32(0.03)), t.constant("zero", np.uint8(128))]
        q = t.node("QuantizeLinear", ["x", *parameters], "q")
        pool = t.node("MaxPool", [q], "pool", kernel_shape=[2, 2])
        y = t.node("DequantizeLinear", [pool, *parameters], "dq")
        assert_near(t.model(y), (1, 8, 8, 8), tolerance=0.02)

    def test_integer_input_of_the_model_stays_dequantized(self) -> None:
        t = Tiny()
        t.inputs = [helper.make_tensor_value_info("x", TensorProto.UINT8, (1, 4))]
        y = t.node("DequantizeLinear", ["x", t.constant("scale", np.float32(0.5))], "dq")
        assert [node.op_type for node in float_twin(t.model(y)).graph.node] == ["DequantizeLinear"]

    def test_subgraph_keeps_what_it_reads(self) -> None:
        t = Tiny((2, 64))
        body = [helper.make_node("MatMul", ["x", "w/dq_out"], ["inner"])]
        value = helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)
        value.type.tensor_type.ClearField("shape")
        branch = helper.make_graph(body, "branch", [], [value])
        t.weight("w", (64, 16), axis=1)
        y = t.node("If", [t.constant("yes", np.array(True))], "if", then_branch=branch, else_branch=branch)
        twin = float_twin(t.model(y))
        assert "w/dq_out" in {tensor.name for tensor in twin.graph.initializer}

    @pytest.mark.parametrize(
        "kind", ["INT8", "UINT8", "INT4", "UINT4", "INT16", "UINT16", "INT2", "UINT2", "FLOAT8E4M3FN", "FLOAT8E5M2"]
    )
    @pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
    def test_stored_types(self, kind: str, granularity: str) -> None:
        """The twin's weight is what onnx's own reference evaluator makes of the DequantizeLinear."""
        from onnx.reference import ReferenceEvaluator

        number = getattr(TensorProto, kind, None)
        if number is None:
            pytest.skip(f"this onnx knows no {kind}")
        t = Tiny((2, 8), opset=25 if "INT2" in kind else 21)
        dtype = helper.tensor_dtype_to_np_dtype(number)
        t.constant("w", t.rng.integers(0, 2, (8, 4)).astype(np.float32).astype(dtype))
        shape = {"tensor": (), "channel": (4,), "block": (2, 4)}[granularity]
        t.constant("s", t.rng.uniform(0.1, 0.2, shape).astype(np.float32))
        t.constant(
            "z", np.ones(shape, np.float32).astype(dtype) if "FLOAT8" not in kind else np.zeros(shape).astype(dtype)
        )
        options = {"tensor": {}, "channel": {"axis": 1}, "block": {"axis": 0, "block_size": 4}}[granularity]
        weight = t.node("DequantizeLinear", ["w", "s", "z"], "w/dq", **options)
        model = t.model(t.node("MatMul", ["x", weight], "product"))
        (stored,) = float_twin(model).graph.initializer
        x = np.eye(8, dtype=np.float32)[:2]
        expected = ReferenceEvaluator(model).run(None, {"x": x})[0]
        np.testing.assert_allclose(x @ numpy_helper.to_array(stored), expected, atol=1e-6)


class TestIntegerOperators:
    """Files whose operators compute on integers themselves: what ONNX Runtime's fusions write, and its tools."""

    def optimized(self, tmp_path: Path, tiny: Tiny, *results: str) -> Any:
        file = tmp_path / "optimized.onnx"
        session_file = tiny.save(tmp_path / "tiny.onnx", *results)
        open_session(session_file, num_threads=1, optimized_file=file)
        return onnx.load(file)

    @pytest.mark.exact_sums
    def test_qgemm_and_matmul_integer_to_float(self, tmp_path: Path) -> None:
        t = Tiny((2, 64))
        x = t.quantized("x")
        fc = t.node("Gemm", [x, t.weight("w", (16, 64)), t.bias("b", 16)], "fc", transB=1)
        product = t.node("MatMul", [x, t.weight("v", (64, 16), axis=1)], "product")
        model = self.optimized(tmp_path, t, fc, product)
        assert {"QGemm", "MatMulIntegerToFloat"} <= {node.op_type for node in model.graph.node}
        assert_near(model, (2, 64), tolerance=0.02)

    def test_light_operators(self, tmp_path: Path) -> None:
        t = Tiny()
        x, other = t.quantized("x"), t.quantized("x", scale=0.05)
        add = t.quantized(t.node("Add", [x, other], "add"), scale=0.06)
        mul = t.quantized(t.node("Mul", [x, other], "mul"), scale=0.1)
        cat = t.quantized(t.node("Concat", [add, mul], "cat", axis=1), scale=0.1)
        pool = t.quantized(t.node("AveragePool", [cat], "pool", kernel_shape=[2, 2]), scale=0.1)
        model = self.optimized(tmp_path, t, t.quantized(t.node("Sigmoid", [pool], "sigmoid"), 0, scale=1 / 255))
        assert sum(node.op_type.startswith("QLinear") for node in model.graph.node) == 5
        assert_near(model, (1, 8, 8, 8), tolerance=0.05)

    def test_matmul_nbits(self, tmp_path: Path) -> None:
        t = Tiny((2, 64))
        model = self.optimized(tmp_path, t, t.node("MatMul", ["x", t.weight("w", (64, 16), axis=1)], "product"))
        assert [node.op_type for node in model.graph.node] == ["MatMulNBits"]
        assert_near(model, (2, 64), tolerance=0.02)

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    @pytest.mark.parametrize("op", ["MatMul", "Conv"])
    def test_dynamic_quantization(self, tmp_path: Path, op: str) -> None:
        from onnxruntime.quantization import QuantType, quantize_dynamic

        shape = (2, 64) if op == "MatMul" else (1, 8, 8, 8)
        t = Tiny(shape)
        weight = t.float_weight("w", (64, 16) if op == "MatMul" else (8, 8, 3, 3))
        plain = t.save(tmp_path / "plain.onnx", t.node(op, ["x", weight], "layer"))
        quantize_dynamic(plain, tmp_path / "dynamic.onnx", op_types_to_quantize=[op], weight_type=QuantType.QUInt8)
        twin = assert_near(onnx.load(tmp_path / "dynamic.onnx"), shape, tolerance=0.03)
        np.testing.assert_allclose(outputs(twin, shape)[0], outputs(onnx.load(plain), shape)[0], atol=0.03)

    def test_unknown_operator_says_what_to_do(self) -> None:
        t = Tiny((2, 64))
        t.nodes.append(helper.make_node("QAttention", ["x"], ["y"], name="attention", domain="com.microsoft"))
        graph = helper.make_graph(t.nodes, "g", t.inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, (2,))])
        with pytest.raises(DeploymentError, match=r"QAttention at attention: .*--against"):
            float_twin(helper.make_model(graph))


class TestDequantize:
    def test_blocks_with_a_shorter_last_one(self) -> None:
        values, scale = np.arange(5, dtype=np.int8).reshape(5, 1), np.array([[1.0], [10.0], [100.0]], np.float32)
        assert dequantize(values, scale, axis=0, block=2).ravel().tolist() == [0, 1, 20, 30, 400]

    def test_channels_and_zero_points(self) -> None:
        values = np.array([[1, 2], [3, 4]], np.uint8)
        found = dequantize(values, np.array([1.0, 0.5], np.float32), np.array([1, 2], np.uint8), axis=0)
        assert found.tolist() == [[0, 1], [0.5, 1]]

    @pytest.mark.parametrize("bits", [2, 4, 8])
    def test_matmul_nbits_layout(self, bits: int) -> None:
        """N = 1, K = 6 in blocks of 4: the first value is in the low bits of the first byte."""
        values = np.array([0, 1, 2, 3, 3, 2, 0, 0], np.uint8)
        per_byte = 8 // bits
        packed = sum(values.reshape(-1, per_byte)[:, i] << (bits * i) for i in range(per_byte)).astype(np.uint8)
        scale, zero = np.array([1.0, 10.0], np.float32), np.array([1.0, 2.0], np.float32)
        found = unpack_matmul_nbits(packed, scale, zero, rows=1, columns=6, bits=bits, block=4)
        assert found.shape == (6, 1) and found.ravel().tolist() == [-1, 0, 1, 2, 10, 0]


def test_unread_nodes_fall_away() -> None:
    t = Tiny()
    t.quantized(t.node("Relu", ["x"], "unread"))
    twin = assert_near(t.model(t.conv("x")), (1, 8, 8, 8), tolerance=1e-6)
    assert [node.op_type for node in twin.graph.node] == ["Conv"]
