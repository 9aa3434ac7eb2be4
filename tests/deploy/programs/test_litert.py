from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.deploy.programs.litert import _check_joins, _layer_name, _quantize_stored
from sparsebit.deploy.sessions.runtime_sessions import open_session
from sparsebit.errors import DeploymentError
from tests.quantization.tiny import Residual, calibrated, qconfig

IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
QMODEL = "sparsebit.quantization.model.quant_model.QuantModel_qmodel"


class Joined(nn.Module):
    """Two branches, a depthwise layer, activations in float."""

    def __init__(self) -> None:
        super().__init__()
        self.joins = "float"
        torch.manual_seed(0)
        self.first, self.deep = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.last = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(x))
        z = F.relu6(self.deep(y))
        x = torch.cat([F.hardswish(z), F.silu(z)] if self.joins == "float" else [y, z], 1)
        return self.last(F.adaptive_avg_pool2d(x, 1).flatten(1))


def test_the_layers_name_is_in_the_name_of_the_value() -> None:
    assert (
        _layer_name(f"a.Named/{QMODEL}/torch.fx.Sequential_layer1/my.QuantOpr_conv1/nn.Conv2d_op;3") == "layer1.conv1"
    )
    assert _layer_name("arith.constant1") == ""


@torch.no_grad()
def test_stored_integers_become_floats_and_a_quantize_op() -> None:
    qmodel = calibrated(Residual().eval(), [IMAGES], qconfig(backend="litert"))
    module: Any = qmodel.export_program(IMAGES).module()
    expected = module(IMAGES)
    codes = {name for name, value in module.named_buffers() if value.dtype == torch.int8}
    _quantize_stored(module)
    assert codes and all(
        node.op != "get_attr" or str(node.target) not in codes or not node.users for node in module.graph.nodes
    )
    assert torch.equal(module(IMAGES), expected)


@pytest.mark.parametrize("is_float", [False, True])
def test_a_concat_of_different_scales_is_refused(is_float: bool) -> None:
    model = Joined()
    model.joins = "float" if is_float else "quantized"
    qmodel = calibrated(model.eval(), [IMAGES], qconfig(backend="litert"))
    module: Any = qmodel.export_program(IMAGES).module()
    if is_float:
        _check_joins(module)
        return
    with pytest.raises(DeploymentError, match="cat: a concat of tensors with different scales"):
        _check_joins(module)


@pytest.fixture
def packages() -> None:
    for module in ("litert_torch", "ai_edge_litert"):
        pytest.importorskip(module, reason="writes and runs .tflite files: the extra litert")


@pytest.mark.slow
@pytest.mark.usefixtures("packages")
def test_integer_layers_are_exact_and_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    qmodel = calibrated(Joined().eval(), [IMAGES], qconfig(backend="litert"))
    parity = qmodel.export(tmp_path / "m.tflite", IMAGES, check=[IMAGES])
    assert parity is not None and parity.worst.max_difference <= 1e-6
    assert not any(capfd.readouterr())
    session: Any = open_session(tmp_path / "m.tflite", "litert", num_threads=1)
    heavy = {layer.op: layer.arithmetic for layer in session.facts.layers if layer.heavy}
    assert heavy == {"CONV_2D": "integer", "DEPTHWISE_CONV_2D": "integer", "FULLY_CONNECTED": "integer"}
    assert {"last"} <= {layer.name for layer in session.facts.layers}


@pytest.mark.slow
@pytest.mark.usefixtures("packages")
def test_a_model_that_the_converter_refuses_leaves_nothing(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.svdvals(x)

    qmodel = calibrated(nn.Sequential(nn.Conv2d(3, 4, 1), Odd()).eval(), [IMAGES], qconfig(backend="litert"))
    with pytest.raises(DeploymentError, match="litert-torch does not take the program"):
        qmodel.export(tmp_path / "m.tflite", IMAGES)
    assert not list(tmp_path.iterdir())
