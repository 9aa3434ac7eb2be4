from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sparsebit.deploy.sessions.runtime_sessions import open_session
from sparsebit.errors import DeploymentError
from tests.deploy.exported_files import op_types, share_of_range
from tests.quantization.tiny import calibrated, qconfig

pytest.importorskip("openvino")
IMAGES = torch.randn(2, 4, 7, 6, generator=torch.Generator().manual_seed(0))


class Strided(nn.Module):
    """A 1x1 convolution with a stride and padding, behind an op of its own."""

    def __init__(self, dims: int, padding: int) -> None:
        super().__init__()
        convolution = nn.Conv2d if dims == 2 else nn.Conv1d
        self.first, self.second = convolution(4, 4, 3, padding=1), convolution(4, 5, 1, stride=2, padding=padding)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


@pytest.mark.parametrize(("dims", "padding"), [(2, 1), (2, 2), (1, 1)])
@pytest.mark.parametrize("is_float", [False, True], ids=["quantized", "float"])
def test_strided_convolutions_of_one_tap(dims: int, padding: int, is_float: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = IMAGES if dims == 2 else IMAGES[..., 0]
    off = [{"second": ["QUANTIZER.DISABLE", True]}] if is_float else []
    config = qconfig({"W.SPECIFIC": off, "A.SPECIFIC": off}, backend="openvino")
    parity = calibrated(Strided(dims, padding), [x], config).export_onnx(x, tmp_path / "m.onnx", check=[x])
    assert parity is not None and parity.worst.sqnr_db > 80


class Largest(nn.Module):
    def __init__(self, then: str) -> None:
        super().__init__()
        self.then, self.layer = then, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.amin((2, 3)) if self.then == "amin" else x.amax((2, 3))
        return self.layer(torch.relu(x) if self.then == "relu" else x * 0.7 if self.then == "mul" else x)


@pytest.mark.parametrize("then", ["linear", "relu", "mul", "amin"])
def test_quantized_maxima(then: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    qmodel = calibrated(Largest(then), [IMAGES], qconfig(backend="openvino"))
    parity = qmodel.export_onnx(IMAGES, tmp_path / "m.onnx", check=[IMAGES])
    assert parity is not None and parity.worst.sqnr_db > 80


def test_a_maximum_at_the_end(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(4, 3, 3), nn.AdaptiveMaxPool2d(1))
    parity = calibrated(model, [IMAGES], qconfig(backend="openvino")).export_onnx(
        IMAGES, tmp_path / "m.onnx", check=[IMAGES]
    )
    assert parity is not None and parity.worst.sqnr_db > 80


@pytest.mark.parametrize("norm", [nn.LayerNorm(6), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)], ids=str)
def test_norms_that_are_clipped(norm: nn.Module, tmp_path: Path) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        norm.weight.uniform_(0.3, 1.7)  # type: ignore[operator]
    model = nn.Sequential(norm, nn.Hardtanh(-0.7, 0.9), nn.Conv2d(4, 3, 1)).eval()
    qmodel = calibrated(model, [IMAGES], qconfig(backend="openvino"))
    parity = qmodel.export_onnx(IMAGES, tmp_path / "m.onnx", check=[IMAGES])
    assert parity is not None and parity.worst.sqnr_db > 80


POOLS = [
    nn.AvgPool2d(3, 2, 1),
    nn.AvgPool2d((3, 2), (2, 3), (1, 1)),
    nn.AvgPool2d(5, 1, 2),
]


@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_averages_that_count_their_padding(pool: nn.Module, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 3, 3, padding=1), pool, nn.Conv2d(3, 2, 1))
    qmodel = calibrated(model, [IMAGES], qconfig(backend="openvino"))
    parity = qmodel.export_onnx(IMAGES, tmp_path / "m.onnx", dynamic_axes={"input": {0: "batch"}}, check=[IMAGES])
    assert parity is not None and parity.worst.sqnr_db > 80
    assert "AveragePool" not in op_types(tmp_path / "m.onnx")


def test_an_average_behind_a_relu_stays(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(4, 3, 3, padding=1), nn.ReLU(), nn.AvgPool2d(3, 2, 1))
    qmodel = calibrated(model, [IMAGES], qconfig(backend="openvino"))
    qmodel.export_onnx(IMAGES, tmp_path / "m.onnx", check=[IMAGES])
    assert op_types(tmp_path / "m.onnx")["AveragePool"] == 1


def test_an_average_with_ceil_mode_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(4, 3, 3, padding=1), nn.AvgPool2d(3, 2, 1, ceil_mode=True))
    qmodel = calibrated(model, [IMAGES], qconfig(backend="openvino"))
    with pytest.raises(DeploymentError, match=r"set ceil_mode=False or count_include_pad=False"):
        qmodel.export_onnx(IMAGES, tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("bias", [None, 0.0, 0.1])
@pytest.mark.parametrize("act", [nn.Identity(), nn.ReLU()], ids=str)
def test_a_linear_layer_without_a_bias_on_one_thread(act: nn.Module, bias: float | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    first = nn.Linear(32, 16, bias=bias is not None)
    if bias is not None:
        nn.init.constant_(first.bias, bias)
    x = torch.randn(3, 32)
    qmodel = calibrated(nn.Sequential(first, act, nn.Linear(16, 8)), [x], qconfig(backend="openvino"))
    qmodel.export_onnx(x, tmp_path / "m.onnx", check=[x])
    session = open_session(tmp_path / "m.onnx", "openvino", num_threads=1)
    (found,) = session.run({session.inputs[0]: x.numpy()})
    assert share_of_range(qmodel(x).detach().numpy(), found) < 1e-5
    assert op_types(tmp_path / "m.onnx")["Max"] == (0 if bias else 1)  # the int32 codes of 0.1 are not equal


def test_linear_layers_with_a_bias_and_those_of_images_stay(tmp_path: Path) -> None:
    for x, bias in ((torch.randn(3, 32), True), (torch.randn(3, 5, 32), False)):
        model = nn.Sequential(nn.Linear(32, 16, bias=bias), nn.Linear(16, 8))
        calibrated(model, [x], qconfig(backend="openvino")).export_onnx(x, tmp_path / "m.onnx", check=[x])
        assert op_types(tmp_path / "m.onnx")["Max"] == 0
