"""The verdict on a file of `virtual` or `tensorrt` holds in the session that users open."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from sparsebit.deploy.comparing.default_session import DefaultSession
from sparsebit.deploy.comparing.parity import Tolerance, decibels
from sparsebit.errors import DeploymentError
from sparsebit.quantization import QuantModel
from tests.deploy.exported_files import op_types
from tests.quantization.tiny import calibrated, qconfig

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
VECTORS = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))


def net(first: nn.Module, second: nn.Module) -> nn.Module:
    return nn.Sequential(first, nn.ReLU(), second).eval()


NETS: dict[str, tuple[nn.Module, Tensor]] = {
    "Conv": (net(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)), IMAGES),
    "ConvTranspose": (net(nn.ConvTranspose2d(3, 8, 2, 2), nn.Conv2d(8, 4, 1)), IMAGES),
    "grouped ConvTranspose": (
        net(nn.ConvTranspose2d(3, 6, 2, 2, groups=3), nn.ConvTranspose2d(6, 4, 2, groups=2)),
        IMAGES,
    ),
    "Gemm": (net(nn.Linear(3, 8), nn.Linear(8, 4)), VECTORS),
    "MatMul and Add": (net(nn.Linear(3, 8), nn.Linear(8, 4)), TOKENS),
}


def default_sqnr(qmodel: QuantModel, file: Path, x: Tensor) -> float:
    """Of a session without any options against the simulation."""
    session: Any = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        expected = qmodel.eval()(x).numpy()
    signal, noise = (np.square(values).sum(dtype=np.float64) for values in (expected, expected - found))
    return decibels(float(signal), float(noise))


def exported(kind: str, tmp_path: Path, *, bias: float, changes: dict[str, Any], backend: str = "virtual") -> float:
    """The SQNR of a default session for a net whose first layer has biases and outputs of this size."""
    model, x = NETS[kind]
    model = copy.deepcopy(model)
    first = model.get_submodule("0")
    with torch.no_grad():
        first.get_parameter("weight").mul_(1e-3)
        first.get_parameter("bias").copy_(torch.linspace(-1, 1, first.get_parameter("bias").numel()) * bias)
    qmodel = calibrated(model, [x], qconfig(changes, backend=backend))
    parity = qmodel.export_onnx(x, tmp_path / "m.onnx", check=[x])
    assert parity is not None and parity.worst.sqnr_db > 100
    return default_sqnr(qmodel, tmp_path / "m.onnx", x)


def bits(weights: int, activations: int) -> dict[str, Any]:
    return {"W.QUANTIZER.BIT": weights, "A.QUANTIZER.BIT": activations}


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", NETS)
def test_biases_beyond_int32_at_16_bits(kind: str, tmp_path: Path) -> None:
    assert exported(kind, tmp_path, bias=10, changes=bits(16, 16)) > 80


@pytest.mark.parametrize("weights", [8, 16])
@pytest.mark.parametrize("scheme", ["per-channel-symmetric", "per-tensor-symmetric"])
def test_other_widths(weights: int, scheme: str, tmp_path: Path) -> None:
    changes = {**bits(weights, 16), "W.QSCHEME": scheme}
    assert exported("Conv", tmp_path, bias=500, changes=changes) > 80


@pytest.mark.parametrize("backend", ["virtual", "tensorrt"])
@pytest.mark.parametrize("kind", ["Conv", "MatMul and Add"])
def test_biases_that_are_far_larger_than_what_8_bit_weights_add(kind: str, backend: str, tmp_path: Path) -> None:
    assert exported(kind, tmp_path, bias=1e5, changes={}, backend=backend) > 60


def test_a_bias_that_is_finer_than_the_accumulator(tmp_path: Path) -> None:
    """Inputs and weights of 2 bits have products of 13 sizes; the next layer reads 8 bits."""
    x = torch.rand(8, 1, generator=torch.Generator().manual_seed(0))
    model = net(nn.Linear(1, 8), nn.Linear(8, 4))
    with torch.no_grad():
        model.get_submodule("0").get_parameter("weight").fill_(1)
        model.get_submodule("0").get_parameter("bias").copy_(torch.linspace(0, 0.3, 8))
    qmodel = calibrated(model, [x], qconfig({**bits(2, 8), "A.SPECIFIC": [{"0": ["QUANTIZER.BIT", 2]}]}))
    qmodel.export_onnx(x, tmp_path / "m.onnx", check=[x])
    assert default_sqnr(qmodel, tmp_path / "m.onnx", x) > 60


@pytest.mark.parametrize("backend", ["virtual", "tensorrt"])
def test_float_weights_between_quantized_activations(backend: str, tmp_path: Path) -> None:
    middle = nn.Conv2d(8, 8, 1)
    with torch.no_grad():
        middle.weight[0] *= 300  # one scale for the whole weight would lose the others
    model = nn.Sequential(nn.Conv2d(3, 8, 3), middle, nn.Conv2d(8, 4, 1)).eval()
    qmodel = calibrated(model, [IMAGES], qconfig({"W.SPECIFIC": [{"1": ["QUANTIZER.DISABLE", True]}]}, backend=backend))
    qmodel.export_onnx(IMAGES, tmp_path / "m.onnx", check=[IMAGES])
    assert default_sqnr(qmodel, tmp_path / "m.onnx", IMAGES) > 50


def test_ordinary_layers_are_written_as_before(tmp_path: Path) -> None:
    qmodel = calibrated(net(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)), [IMAGES], qconfig(backend="tensorrt"))
    qmodel.export_onnx(IMAGES, tmp_path / "m.onnx")
    assert "Max" not in op_types(tmp_path / "m.onnx")


# --- the gate


class Wrong:
    """A default session that answers with `factor` times the right numbers."""

    outputs = ("y",)

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def run(self, feeds: dict[str, Any]) -> list[Any]:
        return [feeds["x"] * np.float32(self.factor)]


def judged(factor: float, noise: float, monkeypatch: pytest.MonkeyPatch, *, is_target: bool = True) -> str:
    monkeypatch.setattr("sparsebit.deploy.comparing.default_session.open_session", lambda *a, **k: Wrong(factor))
    session = DefaultSession(Path("m.onnx"), "m.onnx")
    x = np.linspace(1, 2, 100, dtype=np.float32).reshape(10, 10)
    session.add({"x": x}, [x], [x + np.float32(noise)])
    return session.judge(Tolerance(exact=True), is_target=is_target)


def test_the_remark(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(1.0, 0.1, monkeypatch) == ""
    assert judged(1.001, 0.1, monkeypatch) == "in a default session SQNR 60.0 dB"


def test_a_file_for_users_is_refused_and_one_for_tensorrt_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeploymentError, match=r"m\.onnx .* default session .* SQNR 20\.0 dB .*disable_quant_qdq=1"):
        judged(1.1, 1e-4, monkeypatch)
    with pytest.warns(UserWarning, match=r"SQNR 20\.0 dB .*disable_quant_qdq=1"):
        judged(1.1, 1e-4, monkeypatch, is_target=False)


def test_a_loss_beyond_that_of_quantization_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match=r"output y has an SQNR of 40\.0 dB against the simulation, which has 8\d\."):
        judged(1.01, 1e-4, monkeypatch)
