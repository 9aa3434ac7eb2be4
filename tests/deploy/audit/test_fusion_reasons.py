"""Every reason of the table, triggered by a tiny file in the real runtime: the layer runs in float, and for that."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from onnx import helper  # noqa: E402

from sparsebit.deploy.audit.audit_file import audit  # noqa: E402
from sparsebit.deploy.audit.fusion_reasons import ROWS  # noqa: E402
from sparsebit.records.audit import LayerRun  # noqa: E402
from tests.deploy.tiny_files import Tiny  # noqa: E402

Case = Callable[[], tuple[Tiny, str]]
CASES: dict[str, tuple[Case, str]] = {}


def float_because(cause: str, layer: str = "conv") -> Callable[[Case], Case]:
    def keep(case: Case) -> Case:
        CASES[case.__name__] = (case, layer)
        causes[case.__name__] = cause
        return case

    return keep


causes: dict[str, str] = {}


def linear(**attributes: Any) -> Tiny:
    return Tiny((2, 64), **attributes)


@float_because("it was switched off by the config")
def switched_off() -> tuple[Tiny, str]:
    t = Tiny()
    y = t.node("Conv", ["x", t.float_weight("w", (8, 8, 3, 3))], "conv")
    t.nodes[-1].metadata_props.add(key="sparsebit.switched_off", value="QUANTIZER.DISABLE is true in the config")
    return t, y


@float_because("the file keeps it in float, as it was simulated", "pool")
def kept_float() -> tuple[Tiny, str]:
    t = Tiny()
    y = t.node("GlobalAveragePool", ["x"], "pool")
    t.nodes[-1].metadata_props.add(key="sparsebit.float", value="GlobalAveragePool")
    return t, y


@float_because("products of two activations stay in float by design", "product")
def attention_product() -> tuple[Tiny, str]:
    t = Tiny((1, 4, 16))
    t.backend = "onnxruntime"
    turned = t.node("Transpose", ["x"], "turn", perm=[0, 2, 1])
    return t, t.node("MatMul", ["x", turned], "product")


@float_because("products of two activations stay in float by design", "product")
def einsum() -> tuple[Tiny, str]:
    t = Tiny((4, 16))
    t.backend = "onnxruntime"
    return t, t.node("Einsum", ["x", "x"], "product", equation="ij,kj->ik")


@float_because("adds that no convolution feeds stay in float by design", "add")
def add_of_a_transformer() -> tuple[Tiny, str]:
    t = linear()
    t.backend = "onnxruntime"
    return t, t.node("Add", ["x", t.node("Softmax", ["x"], "softmax")], "add")


@float_because("it adds tensors in float", "add")
def add_behind_a_convolution() -> tuple[Tiny, str]:
    t = Tiny()
    t.backend = "onnxruntime"
    return t, t.node("Add", ["x", t.conv(t.quantized("x"))], "add")


@float_because("it adds tensors in float", "add")
def float_add() -> tuple[Tiny, str]:
    t = Tiny()
    x = t.quantized("x")
    return t, t.quantized(t.node("Add", [x, "x"], "add"))


@float_because("it is not quantized")
def nothing_quantized() -> tuple[Tiny, str]:
    t = Tiny()
    return t, t.node("Conv", ["x", t.float_weight("w", (8, 8, 3, 3))], "conv")


@float_because("its stored weight is dequantized to float on every call", "fc")
def weight_only_gemm() -> tuple[Tiny, str]:
    t = linear()
    return t, t.node("Gemm", ["x", t.weight("w", (16, 64))], "fc", transB=1)


@float_because("its fp8 weight is dequantized to float on every call")
def float8_weight() -> tuple[Tiny, str]:
    t = Tiny()
    w = t.weight("w", (8, 8, 3, 3), dtype=helper.tensor_dtype_to_np_dtype(helper.TensorProto.FLOAT8E4M3FN))
    return t, t.node("Conv", ["x", w], "conv")


@float_because("an input of it is in float")
def float_input() -> tuple[Tiny, str]:
    t = Tiny()
    return t, t.quantized(t.conv("x"))


@float_because("an input of it is in float", "product")
def one_operand_of_an_attention_product() -> tuple[Tiny, str]:
    t = Tiny((1, 4, 16))
    turned = t.node("Transpose", ["x"], "turn", perm=[0, 2, 1])
    return t, t.node("MatMul", [t.quantized("x"), turned], "product")


@float_because("its weight is in float")
def float_weight() -> tuple[Tiny, str]:
    t = Tiny()
    return t, t.node("Conv", [t.quantized("x"), t.float_weight("w", (8, 8, 3, 3))], "conv")


@float_because("its activations are not of 8 bits")
def sixteen_bit_activations() -> tuple[Tiny, str]:
    t = Tiny()
    return t, t.quantized(t.conv(t.quantized("x", 0, np.uint16)), 0, np.uint16)


@float_because("a Flatten is between its quantized input and it", "fc")
def flattened() -> tuple[Tiny, str]:
    t = Tiny((2, 16, 2, 2))
    flat = t.node("Flatten", [t.quantized("x")], "flat")
    return t, t.node("Gemm", [flat, t.weight("w", (16, 64)), t.bias("b", 16)], "fc", transB=1)


@float_because("its scales are computed at run time")
def computed_scale() -> tuple[Tiny, str]:
    t = Tiny()
    scale = t.node("ReduceMax", ["x"], "largest", keepdims=0)
    q = t.node("QuantizeLinear", ["x", scale, t.constant("zero", np.uint8(0))], "q")
    dq = t.node("DequantizeLinear", [q, scale, "zero"], "dq")
    return t, t.quantized(t.conv(dq))


@float_because("its activations have a scale per channel")
def per_channel_activations() -> tuple[Tiny, str]:
    t = Tiny()
    return t, t.quantized(t.conv(t.quantized("x", scale=np.full(8, 0.03), axis=1)))


@float_because("its weights are not of 8 bits")
def sixteen_bit_weights() -> tuple[Tiny, str]:
    t = Tiny()
    return t, t.quantized(t.conv(t.quantized("x"), dtype=np.int16))


@float_because("its weights have scales in blocks", "fc")
def blocked_weights() -> tuple[Tiny, str]:
    t = linear()
    w = t.constant("w", t.rng.integers(-127, 127, (64, 16)).astype(np.int8))
    scale = t.constant("w_scale", np.full((2, 16), 0.002, np.float32))
    dq = t.node("DequantizeLinear", [w, scale], "w/dq", axis=0, block_size=32)
    return t, t.node("Gemm", [t.quantized("x"), dq, t.float_weight("b", (16,))], "fc")


@float_because("its activations are int8 and its weights uint8")
def signed_by_unsigned() -> tuple[Tiny, str]:
    t = Tiny()
    y = t.conv(t.quantized("x", 0, np.int8), dtype=np.uint8, zero_point=128)
    return t, t.quantized(y, 0, np.int8)


@float_because("its bias is computed while the model runs", "fc")
def computed_bias_of_a_gemm() -> tuple[Tiny, str]:
    t = linear()
    bias = t.node(
        "ReduceMean", [t.float_weight("rows", (64, 16)), t.constant("axis", np.array([0]))], "bias", keepdims=0
    )
    shifted = t.node("Add", [bias, t.node("ReduceMax", ["x"], "largest", keepdims=0)], "shifted")
    return t, t.node("Gemm", [t.quantized("x"), t.weight("w", (16, 64)), shifted], "fc", transB=1)


@float_because("its bias is computed while the model runs")
def computed_bias_of_a_convolution() -> tuple[Tiny, str]:
    t = Tiny()
    bias = t.node("ReduceMean", ["x", t.constant("axes", np.array([0, 2, 3]))], "bias", keepdims=0)
    y = t.node("Conv", [t.quantized("x"), t.weight("w", (8, 8, 3, 3)), bias], "conv")
    return t, t.quantized(y)


@float_because("its bias is in float", "fc")
def float_bias_of_a_gemm() -> tuple[Tiny, str]:
    t = linear()
    return t, t.node("Gemm", [t.quantized("x"), t.weight("w", (16, 64)), t.float_weight("b", (16,))], "fc", transB=1)


@float_because("its bias is in float", "product")
def float_bias_behind_a_matmul() -> tuple[Tiny, str]:
    t = linear()
    y = t.node("MatMul", [t.quantized("x"), t.weight("w", (64, 16), axis=1)], "product")
    return t, t.node("Add", [y, t.float_weight("b", (16,))], "add")


@float_because("a batch norm follows it")
def batch_norm() -> tuple[Tiny, str]:
    t = Tiny()
    numbers = [t.constant(f"bn{i}", np.ones(8, np.float32)) for i in range(4)]
    return t, t.quantized(t.node("BatchNormalization", [t.conv(t.quantized("x")), *numbers], "bn"))


@float_because("its output is read by a float add")
def residual_add_in_float() -> tuple[Tiny, str]:
    t = Tiny()
    y = t.conv(t.quantized("x"))
    return t, t.quantized(t.node("Add", [y, "x"], "add"))


@float_because("its output runs into an activation that is computed in float")
def silu() -> tuple[Tiny, str]:
    t = Tiny()
    y = t.conv(t.quantized("x"))
    return t, t.quantized(t.node("Mul", [y, t.node("Sigmoid", [y], "sigmoid")], "mul"))


@float_because("its output is quantized for one reader and float for another")
def two_kinds_of_readers() -> tuple[Tiny, str]:
    t = Tiny()
    y = t.conv(t.quantized("x"))
    add = t.node("Add", [y, "x"], "add")
    return t, t.node("Add", [t.quantized(y), add], "sum")


@float_because("its output is quantized twice")
def two_quantizers() -> tuple[Tiny, str]:
    t = Tiny()
    y = t.conv(t.quantized("x"))
    return t, t.node("Concat", [t.quantized(y), t.quantized(y, scale=0.05)], "cat", axis=1)


@float_because("its activation is not absorbed, because the numbers after it are signed or reach further")
def relu_before_signed_numbers() -> tuple[Tiny, str]:
    t = Tiny()
    y = t.node("Relu", [t.conv(t.quantized("x", 0, np.int8))], "relu")
    return t, t.quantized(y, 0, np.int8)


@float_because("its activation is not absorbed, because the numbers after it are signed or reach further")
def relu6_before_a_wider_range() -> tuple[Tiny, str]:
    t = Tiny()
    limits = [t.constant("low", np.float32(0)), t.constant("high", np.float32(6))]
    y = t.node("Clip", [t.conv(t.quantized("x")), *limits], "clip")
    return t, t.quantized(y, 0, scale=8 / 255)


@float_because("its input and output are of different integer types")
def unsigned_in_signed_out() -> tuple[Tiny, str]:
    t = Tiny()
    return t, t.quantized(t.conv(t.quantized("x")), 0, np.int8)


@float_because("its input and output have different scales", "pool")
def pool_between_two_scales() -> tuple[Tiny, str]:
    t = Tiny()
    y = t.node("MaxPool", [t.quantized("x")], "pool", kernel_shape=[2, 2])
    return t, t.quantized(y, scale=0.05)


@float_because("its output is read in float")
def read_by_a_float_softmax() -> tuple[Tiny, str]:
    t = Tiny()
    return t, t.node("Softmax", [t.conv(t.quantized("x"))], "softmax")


@float_because("its output is the model's output and stays float")
def last_layer() -> tuple[Tiny, str]:
    t = Tiny()
    return t, t.conv(t.quantized("x"))


@float_because("onnxruntime has no integer kernel for ConvTranspose", "up")
def no_kernel() -> tuple[Tiny, str]:
    t = Tiny()
    return t, t.quantized(t.node("ConvTranspose", [t.quantized("x"), t.weight("w", (8, 8, 3, 3))], "up"))


@float_because("onnxruntime has no integer kernel for ReduceMean", "mean")
def no_kernel_for_a_mean() -> tuple[Tiny, str]:
    t = Tiny()
    y = t.node("ReduceMean", [t.quantized("x"), t.constant("axes", np.array([2, 3]))], "mean")
    return t, t.quantized(y)


def layer_of(file: Path, name: str, runtime: str = "onnxruntime") -> LayerRun:
    return next(layer for layer in audit(file, runtime=runtime, repeats=0).layers if layer.name == name)


@pytest.mark.parametrize("name", CASES)
def test_float_for_this_reason(tmp_path: Path, name: str) -> None:
    if name in ("signed_by_unsigned", "unsigned_in_signed_out") and platform.machine() != "aarch64":
        pytest.skip("x86 runs it in integers")
    case, layer = CASES[name]
    tiny, output = case()
    found = layer_of(tiny.save(tmp_path / "tiny.onnx", output), layer)
    assert (found.arithmetic, found.cause) == ("float", causes[name])
    assert found.remedy or name == "nothing_quantized"


def test_every_row_has_its_file() -> None:
    wanted = {row.cause for row in ROWS if "onnxruntime" in row.runtimes}
    assert wanted - set(causes.values()) == set()


def test_every_cause_is_in_the_reference() -> None:
    page = (Path(__file__).parents[3] / "docs/reference/audit-reasons.md").read_text()
    assert [row.cause for row in ROWS if row.cause not in page] == []


def test_what_is_on_purpose_is_no_fault(tmp_path: Path) -> None:
    words = ("by design", "switched off", "as it was simulated")
    on_purpose = {cause for cause in causes.values() if any(word in cause for word in words)}
    assert on_purpose == {row.cause for row in ROWS if row.on_purpose}
    for name, (case, layer) in CASES.items():
        if causes[name] in on_purpose:
            tiny, output = case()
            assert layer_of(tiny.save(tmp_path / "tiny.onnx", output), layer).on_purpose


def test_a_product_of_a_file_that_quantizes_products_is_a_fault(tmp_path: Path) -> None:
    tiny, output = attention_product()
    tiny.backend = "virtual"
    found = layer_of(tiny.save(tmp_path / "tiny.onnx", output), "product")
    assert found.cause == "it is not quantized" and not found.on_purpose


@pytest.mark.parametrize("backend", ["virtual", "tensorrt"])
def test_a_float_bias_that_the_backend_writes_so(backend: str, tmp_path: Path) -> None:
    for case, layer in ((float_bias_of_a_gemm, "fc"), (float_bias_behind_a_matmul, "product")):
        tiny, output = case()
        tiny.backend = backend
        found = layer_of(tiny.save(tmp_path / "tiny.onnx", output), layer)
        assert found.cause == "its bias is in float" and "int32" not in found.remedy.partition("whose")[0]
        assert found.remedy.startswith("export with BACKEND: onnxruntime")


@pytest.mark.skipif(platform.machine() != "aarch64", reason="x86 runs it in integers")
def test_openvino_convolution_on_arm(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    t = Tiny()
    file = t.save(tmp_path / "tiny.onnx", t.quantized(t.conv(t.quantized("x"))))
    found = layer_of(file, "conv", "openvino")
    assert (found.arithmetic, found.cause) == ("float", "OpenVINO has few integer kernels on ARM")


@pytest.mark.parametrize("bias", [False, True], ids=["bare", "bias"])
def test_openvino_with_8_bit_floats(tmp_path: Path, bias: bool) -> None:
    pytest.importorskip("openvino")
    t = linear()
    w = t.weight("w", (64, 16), axis=1, dtype=helper.tensor_dtype_to_np_dtype(helper.TensorProto.FLOAT8E4M3FN))
    output = t.node("MatMul", ["x", w], "product")
    if bias:
        output = t.node("Add", [output, t.float_weight("b", (16,))], "bias")
    found = layer_of(t.save(tmp_path / "tiny.onnx", output), "product", "openvino")
    assert (found.arithmetic, found.cause) == ("float", "its weight is fp8, which is computed in float")


def test_openvino_without_quantization(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    t = linear()
    file = t.save(tmp_path / "tiny.onnx", t.node("MatMul", ["x", t.float_weight("w", (64, 16))], "product"))
    found = layer_of(file, "product", "openvino")
    assert (found.arithmetic, found.cause) == ("float", "it is not quantized")
