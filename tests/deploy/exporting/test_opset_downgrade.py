"""8-bit files in opset 13, as older runtimes read them."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

from sparsebit.errors import DeploymentError
from tests.deploy.exported_files import opset
from tests.quantization.tiny import calibrated, qconfig

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3), nn.Linear(8, 4)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = self.pool(torch.relu(self.second(x + torch.sigmoid(x))))
        return self.head(x.flatten(2).mean(2)) + self.head(x.mean((2, 3)))


@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt"])
@pytest.mark.exact_sums
def test_opset_13(backend: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    qmodel = calibrated(Net(), [X], qconfig(backend=backend))
    parity = qmodel.export_onnx(X, tmp_path / "m.onnx", opset_version=13, check=[X])
    assert parity is not None and parity.worst.sqnr_db > 60
    assert opset(tmp_path / "m.onnx") == 13
    onnx.checker.check_model(str(tmp_path / "m.onnx"), full_check=True)


def test_an_op_that_the_opset_lacks_is_named(tmp_path: Path) -> None:
    qmodel = calibrated(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), [X], qconfig(backend="onnxruntime"))
    with pytest.raises(DeploymentError, match=r"opset_version=13: LayerNormalization at .* it is of opset 17"):
        qmodel.export_onnx(X, tmp_path / "m.onnx", opset_version=13)
    qmodel.export_onnx(X, tmp_path / "m.onnx", opset_version=17, check=[X])
    assert opset(tmp_path / "m.onnx") == 17
