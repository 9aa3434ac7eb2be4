"""Files with fp8 weights: what they hold, what the runtimes make of them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.deploy.audit.audit_file import audit
from sparsebit.deploy.comparing.float_twin import float_twin
from sparsebit.deploy.sessions.runtime_sessions import open_session
from sparsebit.errors import DeploymentError
from sparsebit.numerics.float8 import codes_of
from sparsebit.quantization import QuantModel
from sparsebit.quantization.ops.quant_opr import WeightedQuantOpr
from tests.deploy.exported_files import EXACT, initializers, metadata, op_types, types, worst
from tests.parameters import first_fast
from tests.quantization.exporting.test_export import IDS, IMAGES, Computed, Convolutions, Linears, X
from tests.quantization.tiny import Residual, calibrated, qconfig, site

MODELS: dict[str, tuple[type[nn.Module], Tensor]] = {
    "convolutions": (Convolutions, IMAGES),
    "computed": (Computed, IMAGES),
    "linears": (Linears, IDS),
    "residual": (Residual, torch.randn(2, 3, 8, 8)),
}


def float8(model: nn.Module, x: Any, changes: dict[str, Any] | None = None, backend: str = "onnxruntime") -> QuantModel:
    """Weights in fp8, activations in float."""
    values = {"W.QUANTIZER.TYPE": "fp8", "A.QUANTIZER": {"DISABLE": True}, **(changes or {})}
    return calibrated(model, [x], qconfig(values, backend=backend))


BACKENDS = ("virtual", "onnxruntime", "openvino", "tensorrt")
# Every kind of layer with a scale per channel on every backend; one scale for all on one kind. Each kind and each
# backend is in one that always runs.
ALWAYS = [("convolutions", "tensorrt"), ("computed", "onnxruntime"), ("linears", "openvino"), ("residual", "virtual")]
CASES = [
    *(
        pytest.param(name, "per-channel-symmetric", backend, marks=[pytest.mark.slow] * ((name, backend) not in ALWAYS))
        for name in MODELS
        for backend in BACKENDS
    ),
    *first_fast(("linears", "per-tensor-symmetric", backend) for backend in BACKENDS if backend != "tensorrt"),
]


@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore:.*is obeyed, against the onnxruntime profile")
@pytest.mark.parametrize(("name", "scheme", "backend"), CASES)
def test_runtimes_compute_what_was_simulated(name: str, scheme: str, backend: str, tmp_path: Path) -> None:
    if backend == "openvino":
        pytest.importorskip("openvino")
        if name == "convolutions":
            pytest.skip("OpenVINO has no circular padding")
    kind, x = MODELS[name]
    torch.manual_seed(0)
    qmodel = float8(kind(), x, {"W.QSCHEME": scheme}, backend)
    file = tmp_path / "m.onnx"
    parity = qmodel.export_onnx(x, file, check=[x])
    assert parity is not None
    onnx.checker.check_model(str(file), full_check=True)
    assert worst(qmodel, file, x) <= EXACT
    stored = {value: kind for value, kind in types(file).items() if value.endswith("/codes")}
    assert stored and set(stored.values()) == {"FLOAT8E4M3FN"}
    assert op_types(file)["QuantizeLinear"] == 0


@pytest.mark.parametrize(("scheme", "num_scales"), [("per-channel-symmetric", 6), ("per-tensor-symmetric", 1)])
@pytest.mark.filterwarnings("ignore:.*is obeyed, against the onnxruntime profile")
def test_what_the_file_holds(scheme: str, num_scales: int, tmp_path: Path) -> None:
    layer = nn.Conv2d(4, 6, 3)
    qmodel = float8(nn.Sequential(layer), IMAGES, {"W.QSCHEME": scheme})
    file = tmp_path / "m.onnx"
    qmodel.export_onnx(IMAGES, file, extra_info=True)
    stored, scale = initializers(file)["0.weight/codes"], initializers(file)["0.weight/scale"]
    quantizer = site(qmodel, "0.weight")
    assert scale.size == num_scales and torch.equal(torch.tensor(scale), quantizer.scale)
    codes = codes_of(layer.weight.detach(), quantizer.scale, quantizer.spec.granularity.axis)
    assert torch.equal(torch.tensor(stored.astype("float32")), codes)
    assert abs(stored.astype("float32")).max() == 448
    (dequantize,) = [node for node in onnx.load(str(file)).graph.node if node.op_type == "DequantizeLinear"]
    assert dequantize.name == "0.weight/dq" and len(dequantize.input) == 2
    assert metadata(dequantize) == {"sparsebit.site": "0.weight", "sparsebit.role": "weight", "sparsebit.bits": "8"}
    facts = json.loads(metadata(onnx.load(str(tmp_path / "m_extra.onnx")))["sparsebit.sites"])["0.weight"]
    assert facts["stored_as"] == "float8e4m3fn" and facts["bits"] == 8 and facts["quantizer"] == "fp8"


def test_files_are_a_quarter_of_float_ones(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)), torch.randn(2, 256)
    float8(model, x).export_onnx(x, tmp_path / "m.onnx", check=[x])
    num_bytes = sum(4 * parameter.numel() for parameter in model.parameters())
    assert 0.25 < (tmp_path / "m.onnx").stat().st_size / num_bytes < 0.27


def test_beside_8_bit_activations(tmp_path: Path) -> None:
    qmodel = calibrated(Residual(), [torch.randn(2, 3, 8, 8)], qconfig({"W.QUANTIZER.TYPE": "fp8"}))
    x = torch.randn(2, 3, 8, 8)
    qmodel.export_onnx(x, tmp_path / "m.onnx", check=[x])
    assert op_types(tmp_path / "m.onnx")["QuantizeLinear"] > 0


def test_among_layers_that_run_in_integers(tmp_path: Path) -> None:
    """OpenVINO: the layer reads a quantized tensor, but is none of those that compute in integers."""
    pytest.importorskip("openvino")
    changes = {
        "W.SPECIFIC": [{"conv": ["QUANTIZER.TYPE", "fp8"]}],
        "A.SPECIFIC": [{"conv": ["QUANTIZER.DISABLE", True]}],
    }
    x = torch.randn(4, 3, 8, 8)
    qmodel = calibrated(Residual(), [x], qconfig(changes, backend="openvino"))
    layers = [module for module in qmodel.modules() if isinstance(module, WeightedQuantOpr)]
    rounded = {layer.weight_quantizer.name: layer.bias_rounding is not None for layer in layers}
    assert rounded == {"stem.conv.weight": True, "conv.weight": False, "fc.weight": True}
    qmodel.export_onnx(x, tmp_path / "m.onnx", check=[x])
    assert types(tmp_path / "m.onnx")["conv.weight/codes"] == "FLOAT8E4M3FN"
    assert types(tmp_path / "m.onnx")["stem.conv.weight/codes"] == "INT8"


def test_half_precision(tmp_path: Path) -> None:
    x = X.half()
    qmodel = float8(nn.Sequential(nn.Linear(6, 5)).half(), x)
    qmodel.export_onnx(x, tmp_path / "m.onnx")
    assert worst(qmodel, tmp_path / "m.onnx", x) <= 5e-3


def test_opset_versions(tmp_path: Path) -> None:
    qmodel = float8(nn.Sequential(nn.Linear(6, 5)), X)
    qmodel.export_onnx(X, tmp_path / "m.onnx", opset_version=19, check=[X])
    with pytest.raises(DeploymentError, match=r"opset_version=18: 0.weight \(float8e4m3fn, per channel\) needs 19"):
        qmodel.export_onnx(X, tmp_path / "m.onnx", opset_version=18)


class Given(nn.Module):
    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)


def test_a_weight_that_is_computed_is_refused(tmp_path: Path) -> None:
    given = (X, torch.randn(3, 6))
    config = qconfig({"W.QUANTIZER.TYPE": "fp8", "A.QUANTIZER": {"DISABLE": True}}, backend="onnxruntime")
    qmodel = calibrated(Given(), [given], config)
    with pytest.raises(DeploymentError, match=r"linear.weight: fp8 is for stored weights"):
        qmodel.export_onnx(given, tmp_path / "m.onnx")


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_the_audit_tells_what_becomes_of_it(runtime: str, tmp_path: Path) -> None:
    pytest.importorskip(runtime)
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 49, 3))
    float8(model, IMAGES, backend=runtime).export_onnx(IMAGES, tmp_path / "m.onnx")
    found = audit(tmp_path / "m.onnx", runtime=runtime, repeats=0)
    assert [layer.arithmetic for layer in found.layers] == ["float", "float"]
    assert all("fp8" in layer.cause and "TYPE: uniform" in layer.remedy for layer in found.layers)


def test_onnxruntime_dequantizes_once_if_told_to(tmp_path: Path) -> None:
    """What the audit advises."""
    qmodel = float8(nn.Sequential(nn.Linear(6, 5)), X)
    qmodel.export_onnx(X, tmp_path / "m.onnx")
    made, options = tmp_path / "optimized.onnx", {"session.disable_quant_qdq": "1"}
    open_session(tmp_path / "m.onnx", options=options, optimized_file=made)
    assert op_types(made)["DequantizeLinear"] == 0
    assert worst(qmodel, tmp_path / "m.onnx", X, optimize=True, options=options) <= EXACT


def test_the_float_twin_computes_the_same(tmp_path: Path) -> None:
    qmodel = float8(nn.Sequential(nn.Linear(6, 5)), X)
    qmodel.export_onnx(X, tmp_path / "m.onnx")
    twin = float_twin(tmp_path / "m.onnx")
    assert {tensor.data_type for tensor in twin.graph.initializer} == {onnx.TensorProto.FLOAT}
    (found,) = open_session(twin.SerializeToString()).run({"input": X.numpy()})
    assert torch.allclose(torch.tensor(found), qmodel(X), atol=1e-6)
