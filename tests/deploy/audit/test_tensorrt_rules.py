"""TensorRT's rules: a file that keeps them all, and for every rule one that breaks it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("onnx")

from onnx import helper  # noqa: E402

from sparsebit.deploy.audit.tensorrt_rules import RULES, tensorrt_violations  # noqa: E402
from tests.deploy.tiny_files import Tiny  # noqa: E402

Case = Callable[[], Any]
CASES: dict[str, list[Case]] = {}


def breaks(rule: str) -> Callable[[Case], Case]:
    def keep(case: Case) -> Case:
        CASES.setdefault(rule, []).append(case)
        return case

    return keep


def signed(t: Tiny, value: str, **options: Any) -> str:
    return t.quantized(value, 0, np.int8, **options)


def conv(t: Tiny, x: str, name: str = "conv", **weight: Any) -> str:
    """As TensorRT wants it: int8 weight per output channel, bias in float."""
    w = t.weight(f"{name}_w", (8, 8, 3, 3), **weight)
    return t.node("Conv", [x, w, t.float_weight(f"{name}_b", (8,))], name, pads=[1, 1, 1, 1])


def clean() -> Any:
    t = Tiny()
    x = signed(t, "x")
    y = signed(t, t.node("Relu", [conv(t, x, "first")], "relu"))
    add = t.node("Add", [signed(t, conv(t, y, "second")), y], "add")
    pooled = t.node("GlobalAveragePool", [signed(t, add)], "pool")
    flat = signed(t, t.node("Flatten", [pooled], "flat"))
    return t.model(t.node("Gemm", [flat, t.weight("w", (4, 8)), t.float_weight("b", (4,))], "fc", transB=1))


@breaks("operators")
def dynamic_quantization() -> Any:
    t = Tiny()
    t.nodes.append(helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"], name="dynamic"))
    return t.model("q")


@breaks("opset")
def channels_before_opset_13() -> Any:
    t = Tiny(opset=12)
    w = t.constant("w", np.ones((8, 8, 3, 3), np.int8))
    dq = t.node(
        "DequantizeLinear", [w, t.constant("s", np.ones(8, np.float32)), t.constant("z", np.zeros(8, np.int8))], "dq"
    )
    t.nodes.append(helper.make_node("Conv", ["x", dq], ["y"], name="conv"))
    values = [helper.make_empty_tensor_value_info("y")]
    graph = helper.make_graph(t.nodes, "old", t.inputs, values, t.initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 12)])


@breaks("types")
def unsigned_activations() -> Any:
    t = Tiny()
    return t.model(conv(t, t.quantized("x", 0)))


@breaks("types")
def sixteen_bits() -> Any:
    t = Tiny()
    return t.model(conv(t, t.quantized("x", 0, np.int16)))


@breaks("zero-points")
def shifted_activations() -> Any:
    t = Tiny()
    return t.model(conv(t, t.quantized("x", 5, np.int8)))


@breaks("zero-points")
def shifted_weights() -> Any:
    t = Tiny()
    return t.model(conv(t, signed(t, "x"), zero_point=3))


@breaks("scales")
def computed_scale() -> Any:
    t = Tiny()
    scale = t.node("ReduceMax", ["x"], "largest", keepdims=0)
    q = t.node("QuantizeLinear", ["x", scale, t.constant("zero", np.int8(0))], "q")
    return t.model(conv(t, t.node("DequantizeLinear", [q, scale, "zero"], "dq")))


@breaks("scales")
def negative_scale() -> Any:
    t = Tiny()
    return t.model(conv(t, signed(t, "x", scale=-0.1)))


@breaks("activation-scales")
def per_channel_activations() -> Any:
    t = Tiny()
    return t.model(conv(t, signed(t, "x", scale=np.full(8, 0.03), axis=1)))


@breaks("activation-bits")
def four_bit_activations() -> Any:
    t = Tiny()
    int4 = helper.tensor_dtype_to_np_dtype(helper.TensorProto.INT4)
    return t.model(conv(t, t.quantized("x", 0, int4)))


@breaks("bias")
def quantized_bias() -> Any:
    t = Tiny()
    return t.model(t.conv(signed(t, "x")))


@breaks("channel-axis")
def scales_of_input_channels() -> Any:
    t = Tiny()
    return t.model(conv(t, signed(t, "x"), axis=1))


@breaks("channel-axis")
def scales_of_the_rows_of_a_product() -> Any:
    t = Tiny((2, 64))
    return t.model(t.node("MatMul", [signed(t, "x"), t.weight("w", (64, 16), axis=0)], "product"))


def blocked(dtype: Any, rows: int, block: int) -> Any:
    t = Tiny((2, rows))
    w = t.constant("w", np.ones((rows, 3), np.float32).astype(dtype))
    scale = t.constant("s", np.ones((-(-rows // block), 3), np.float32))
    dq = t.node("DequantizeLinear", [w, scale], "dq", axis=0, block_size=block)
    return t.model(t.node("MatMul", ["x", dq], "product"))


INT4 = helper.tensor_dtype_to_np_dtype(helper.TensorProto.INT4)


@breaks("blocks")
def blocks_of_eight_bits() -> Any:
    return blocked(np.int8, 32, 16)


@breaks("blocks")
def blocks_that_do_not_divide() -> Any:
    return blocked(INT4, 40, 16)


@breaks("pairs")
def pool_on_integers() -> Any:
    t = Tiny()
    parameters = [t.constant("s", np.float32(0.1)), t.constant("z", np.int8(0))]
    q = t.node("QuantizeLinear", ["x", *parameters], "q")
    pool = t.node("MaxPool", [q], "pool", kernel_shape=[2, 2])
    return t.model(t.node("DequantizeLinear", [pool, *parameters], "dq"))


@breaks("both-operands")
def float_weight() -> Any:
    t = Tiny()
    return t.model(t.node("Conv", [signed(t, "x"), t.float_weight("w", (8, 8, 3, 3))], "conv"))


@breaks("weight-next-to-layer")
def transposed_weight() -> Any:
    t = Tiny((2, 64))
    turned = t.node("Transpose", [t.weight("w", (16, 64))], "turn", perm=[1, 0])
    return t.model(t.node("MatMul", [signed(t, "x"), turned], "product"))


@breaks("batch-norm")
def batch_norm() -> Any:
    t = Tiny()
    numbers = [t.constant(f"bn{i}", np.ones(8, np.float32)) for i in range(4)]
    return t.model(t.node("BatchNormalization", [conv(t, signed(t, "x")), *numbers], "bn"))


@breaks("activation-fusion")
def pair_in_front_of_the_relu() -> Any:
    t = Tiny()
    return t.model(t.node("Relu", [signed(t, conv(t, signed(t, "x")))], "relu"))


@breaks("concat-scales")
def concat_of_two_scales() -> Any:
    t = Tiny()
    return t.model(t.node("Concat", [signed(t, "x"), signed(t, "x", scale=0.05)], "cat", axis=1))


@breaks("residual-add")
def float_residual_add() -> Any:
    t = Tiny()
    return t.model(t.node("Add", [conv(t, signed(t, "x")), "x"], "add"))


def test_clean_file() -> None:
    assert tensorrt_violations(clean()) == []


def test_four_bit_weights_alone() -> None:
    assert tensorrt_violations(blocked(INT4, 32, 16)) == []


@pytest.mark.parametrize("dtype", ["FLOAT8E4M3FN"])
def test_eight_bit_floats(dtype: str) -> None:
    t = Tiny()
    kind = helper.tensor_dtype_to_np_dtype(getattr(helper.TensorProto, dtype))
    w = t.quantized(t.float_weight("w", (8, 8, 3, 3)), 0, kind)
    assert tensorrt_violations(t.model(t.node("Conv", [t.quantized("x", 0, kind), w], "conv"))) == []


@breaks("both-operands")
def two_types() -> Any:
    t = Tiny()
    w = t.weight("w", (8, 8, 3, 3), dtype=helper.tensor_dtype_to_np_dtype(helper.TensorProto.FLOAT8E4M3FN))
    return t.model(t.node("Conv", [signed(t, "x"), w], "conv"))


def test_eight_bit_floats_need_their_opset() -> None:
    model = two_types()
    model.opset_import[0].version = 18
    assert "opset 18; 8-bit floats need opset 19" in "\n".join(map(str, tensorrt_violations(model)))


@pytest.mark.parametrize(
    ("rule", "case"), [pytest.param(rule, case, id=case.__name__) for rule, cases in CASES.items() for case in cases]
)
def test_broken(rule: str, case: Case) -> None:
    found = [violation for violation in tensorrt_violations(case()) if violation.rule == rule]
    severity = next(entry.severity for entry in RULES if entry.name == rule)
    assert found and all(violation.severity == severity for violation in found)
    assert all(violation.node and violation.message and violation.remedy and violation.source for violation in found)


def test_every_rule_has_its_file() -> None:
    assert set(CASES) == {rule.name for rule in RULES}


def test_odd_number_of_four_bit_values() -> None:
    assert any("must be even" in violation.message for violation in tensorrt_violations(blocked(INT4, 5, 5)))


def test_file_errors_first(tmp_path: Path) -> None:
    t = Tiny()
    y = t.node("Relu", [t.quantized(t.conv(t.quantized("x")))], "relu")
    found = tensorrt_violations(t.save(tmp_path / "ort.onnx", y))
    severities = [violation.severity for violation in found]
    assert severities == sorted(severities, key=["error", "advice"].index) and set(severities) == {"error", "advice"}
    assert {violation.rule for violation in found} == {"types", "zero-points", "bias", "activation-fusion"}
    assert "conv_b/dq: a DequantizeLinear on int32" in "\n".join(map(str, found))
