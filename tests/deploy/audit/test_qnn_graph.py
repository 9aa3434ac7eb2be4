from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sparsebit.deploy.audit.audit_file import audit
from sparsebit.deploy.audit.qnn_graph import _ends, _find
from sparsebit.deploy.comparing.check import runtime_of
from sparsebit.deploy.onnx_graph.qdq_graph import Graph
from sparsebit.deploy.sessions.htp_simulator import PACKAGE, HtpNode
from sparsebit.errors import ConfigError, DeploymentError
from tests.deploy.layouts.test_htp_layout import IDS, IMAGES, Block
from tests.deploy.tiny_files import Tiny
from tests.quantization.tiny import Residual, calibrated, qconfig


def graph() -> Graph:
    tiny = Tiny((1, 8, 6, 6))
    y = tiny.node("Relu", [tiny.conv(tiny.quantized("x"))], "relu")
    return Graph(tiny.model(tiny.quantized(y)))


def test_a_layer_is_found_by_its_name_or_by_what_it_writes() -> None:
    file = graph()
    conv = next(node for node in file.nodes if node.op_type == "Conv")
    codes = next(value for value in _ends(file, conv.output[0]) if "/q" in value)
    node = HtpNode("renamed", "Conv2d", (codes,), False)
    moved = HtpNode("moved", "Transpose", (codes,), False)
    assert _find(file, conv, {codes: node}, {}) is node
    assert _find(file, conv, {codes: moved}, {"conv": node}) is node
    assert _find(file, conv, {codes: moved}, {}) is None


def test_integer_weights_need_integer_activations() -> None:
    with pytest.raises(ConfigError, match=r"W.QUANTIZER.BIT=8: qnn runs no integer weights with float activations"):
        qconfig({"A.QUANTIZER.DISABLE": True}, backend="qnn")


@pytest.mark.slow
@pytest.mark.parametrize(("activations", "weights"), [(8, 8), (16, 8), (8, 4), (16, 4)])
@pytest.mark.parametrize("model", [Residual, Block])
def test_every_layer_runs_in_integers(model: type[nn.Module], activations: int, weights: int, tmp_path: Path) -> None:
    pytest.importorskip(PACKAGE, reason="the simulator of Qualcomm's HTP: the extra qnn")
    data = IDS[:1] if model is Block else IMAGES[:1]
    config = qconfig({"A.QUANTIZER.BIT": activations, "W.QUANTIZER.BIT": weights}, backend="qnn")
    torch.manual_seed(0)
    qmodel = calibrated(model().eval(), [IDS if model is Block else IMAGES], config)
    parity = qmodel.export_onnx(data, tmp_path / "m.onnx", check=[data])
    assert parity is not None and runtime_of(tmp_path / "m.onnx") == "qnn"
    found = audit(tmp_path / "m.onnx", runtime="qnn")
    assert {layer.arithmetic for layer in found.heavy} == {"integer"} and found.ratio is None
    assert any("simulated" in warning for warning in found.warnings)


@pytest.mark.slow
def test_a_model_with_an_op_that_the_htp_lacks_is_not_written(tmp_path: Path) -> None:
    pytest.importorskip(PACKAGE, reason="the simulator of Qualcomm's HTP: the extra qnn")

    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.erf(x)

    qmodel = calibrated(nn.Sequential(nn.Conv2d(3, 4, 1), Odd()).eval(), [IMAGES], qconfig(backend="qnn"))
    with pytest.raises(DeploymentError, match=r"m\.onnx does not run on the HTP: it refuses Erf"):
        qmodel.export_onnx(IMAGES[:1], tmp_path / "m.onnx", check=[IMAGES[:1]])
    assert not list(tmp_path.iterdir())
