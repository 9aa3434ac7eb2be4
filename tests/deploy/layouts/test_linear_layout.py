from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

from sparsebit.deploy.layouts.linear_layout import lay_out_linears
from sparsebit.deploy.sessions.runtime_sessions import EXACT, open_session
from tests.deploy.exported_files import differences, initializers, op_types, optimized_ops
from tests.quantization.tiny import calibrated, qconfig

RNG = np.random.default_rng(0)


def gemm(
    *, transposed: bool, weight_only: bool, group: int = 0, bias: bool = True, shares: bool = False, **attributes: Any
) -> ir.Model:
    """An input (3, 8) times a stored weight (8 in, 5 out), by Gemm; `transposed`: it is kept as (5, 8)."""
    shape = (5, 8) if transposed else (8, 5)
    axis = 1 if transposed else 0
    scales = (
        tuple(size // group if group and dim == axis else size for dim, size in enumerate(shape)) if group else (5,)
    )
    values = {
        "codes": RNG.integers(-128, 128, shape).astype(np.int8),
        "scale": RNG.uniform(0.01, 0.02, scales).astype(np.float32),
        "zero_point": np.zeros(scales, np.int8),
        "bias": RNG.normal(size=5).astype(np.float32),
        "x_scale": np.array(0.02, np.float32),
        "x_zero": np.array(128, np.uint8),
    }
    constants = {name: ir.Value(name=name, const_value=ir.tensor(array, name=name)) for name, array in values.items()}
    for value in constants.values():
        assert value.const_value is not None
        value.shape, value.dtype = ir.Shape(value.const_value.shape), value.const_value.dtype
    x = ir.Value(name="x", shape=ir.Shape((3, 8)), type=ir.TensorType(ir.DataType.FLOAT))
    place = {"axis": axis, "block_size": group} if group else {"axis": 1 - axis}
    weight = ir.node("DequantizeLinear", [constants[n] for n in ("codes", "scale", "zero_point")], place, name="w/dq")
    nodes, source = [weight], x
    if not weight_only:
        numbers = [constants["x_scale"], constants["x_zero"]]
        nodes.append(ir.node("QuantizeLinear", [x, *numbers], name="x/q"))
        nodes.append(ir.node("DequantizeLinear", [nodes[-1].outputs[0], *numbers], name="x/dq"))
        source = nodes[-1].outputs[0]
    inputs = [source, weight.outputs[0], *([constants["bias"]] if bias else [])]
    product = ir.node("Gemm", inputs, {"transB": int(transposed), **attributes}, name="fc")
    nodes.append(product)
    outputs = [product.outputs[0]]
    if shares:
        nodes.append(ir.node("Gemm", inputs[:2], {"transB": int(transposed)}, name="again"))
        outputs.append(nodes[-1].outputs[0])
    for index, output in enumerate(outputs):
        output.name, output.dtype, output.shape = f"y{index}", ir.DataType.FLOAT, ir.Shape((3, 5))
    graph = ir.Graph([x], outputs, nodes=nodes, initializers=tuple(constants.values()), opset_imports={"": 21})
    return ir.Model(graph, ir_version=10)


def run(model: ir.Model) -> list[Any]:
    data = ir.to_proto(model).SerializeToString()
    return open_session(data, optimize=False).run({"x": np.linspace(-2, 2, 24, dtype=np.float32).reshape(3, 8)})


CASES = {
    "transposed": {"transposed": True, "weight_only": True},
    "plain": {"transposed": False, "weight_only": True},
    "without_bias": {"transposed": True, "weight_only": True, "bias": False},
    "groups": {"transposed": True, "weight_only": True, "group": 4},
    "activations_too": {"transposed": True, "weight_only": False},
    "scaled": {"transposed": True, "weight_only": True, "alpha": 0.5},
    "read_twice": {"transposed": True, "weight_only": True, "shares": True},
}


@pytest.mark.parametrize("case", CASES)
def test_a_gemm_computes_the_same_afterwards(case: str) -> None:
    model = gemm(**CASES[case])  # type: ignore[arg-type]
    expected = run(model)
    lay_out_linears(model)
    for mine, theirs in zip(expected, run(model), strict=True):
        assert np.allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize(
    ("case", "ops"),
    [
        ("transposed", {"DequantizeLinear", "MatMul", "Add"}),
        ("without_bias", {"DequantizeLinear", "MatMul"}),
        ("groups", {"DequantizeLinear", "MatMul", "Add"}),
        ("activations_too", {"QuantizeLinear", "DequantizeLinear", "Gemm"}),
        ("scaled", {"DequantizeLinear", "Gemm"}),
    ],
)
def test_only_weight_only_gemms_become_matmuls(case: str, ops: set[str]) -> None:
    model = gemm(**CASES[case])  # type: ignore[arg-type]
    lay_out_linears(model)
    assert {node.op_type for node in model.graph} == ops
    assert [output.name for output in model.graph.outputs] == ["y0"]


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 64), nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def weight_only(bits: int, scheme: str, group: int, backend: str) -> Any:
    changes = {
        "W.QSCHEME": scheme,
        "W.QUANTIZER.BIT": bits,
        "W.QUANTIZER.GROUP_SIZE": group,
        "A.QUANTIZER.DISABLE": True,
    }
    return qconfig(changes, backend=backend)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("bits", "scheme", "group", "width", "num_dims"),
    [
        (4, "per-group-symmetric", 32, 256, 3),
        (4, "per-group-affine", 64, 256, 2),
        (4, "per-group-symmetric", 128, 250, 2),  # a ragged group, and a layer that is one group by itself
        (8, "per-group-symmetric", 64, 250, 4),
        (8, "per-group-affine", 128, 256, 2),
        (4, "per-channel-symmetric", 128, 256, 3),
    ],
    ids=str,
)
def test_weight_only_linears_become_one_kernel(
    bits: int, scheme: str, group: int, width: int, num_dims: int, tmp_path: Path
) -> None:
    x = torch.randn(*[2] * (num_dims - 1), width)
    qmodel = calibrated(Mlp(width), [x], weight_only(bits, scheme, group, "onnxruntime"))
    file = tmp_path / "m.onnx"
    qmodel.export_onnx(x, file)
    assert optimized_ops(file, tmp_path)["MatMulNBits"] == 2
    assert op_types(file)["Gemm"] == 0
    exact = differences(qmodel, file, x, optimize=True, options=EXACT["onnxruntime"])
    assert max(exact.values()) <= 1e-6
    # The runtime's own choice rounds the activations to int8; the file is not to blame.
    assert max(differences(qmodel, file, x, optimize=True).values()) <= 0.02


def test_openvino_runs_groups_too(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 256)
    qmodel = calibrated(Mlp(256), [x], weight_only(4, "per-group-affine", 128, "openvino"))
    pytest.importorskip("openvino")
    parity = qmodel.export_onnx(x, tmp_path / "m.onnx", check=[x])
    assert parity is not None and parity.worst.max_difference <= 1e-5
    assert "DYNAMIC_QUANTIZATION_GROUP_SIZE" in str(parity)


@pytest.mark.exact_sums
def test_quantized_linears_of_tokens_need_no_transpose(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 16)
    qmodel = calibrated(Mlp(16), [x], qconfig(backend="onnxruntime"))
    qmodel.export_onnx(x, tmp_path / "m.onnx")
    assert op_types(tmp_path / "m.onnx")["Transpose"] == 0
    assert initializers(tmp_path / "m.onnx")["up.weight/codes"].shape == (16, 64)
    assert differences(qmodel, tmp_path / "m.onnx", x, optimize=True) == {"output": 0.0}
