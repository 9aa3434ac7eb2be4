from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.deploy.exported_files import EXACT, op_types, optimized_ops
from tests.quantization.tiny import calibrated, qconfig

X = torch.randn(2, 4, 9, 9, generator=torch.Generator().manual_seed(0))


class Padded(nn.Module):
    """TensorFlow's SAME: a pad of its own in front of every convolution."""

    def __init__(self, **settings: object) -> None:
        super().__init__()
        self.settings = settings
        self.first, self.second = nn.Conv2d(4, 8, 3, stride=2), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(F.pad(x, (0, 1, 0, 1), **self.settings)))
        return self.second(F.pad(x, (1, 2, 0, 1), **self.settings))


def test_a_convolution_pads_by_itself(tmp_path: Path) -> None:
    torch.manual_seed(0)
    qmodel = calibrated(Padded(), [X], qconfig({"A.OBSERVER.TYPE": "mse"}, backend="onnxruntime"))
    parity = qmodel.export_onnx(X, tmp_path / "m.onnx", check=[X])
    assert parity is not None and parity.worst.max_difference <= EXACT
    assert "Pad" not in op_types(tmp_path / "m.onnx")
    ops = optimized_ops(tmp_path / "m.onnx", tmp_path)
    assert ops["QLinearConv"] == 2 and ops["QuantizeLinear"] == 1


@pytest.mark.parametrize("settings", [{"value": 1.0}, {"mode": "reflect"}], ids=str)
def test_other_pads_stay(settings: dict[str, object], tmp_path: Path) -> None:
    torch.manual_seed(0)
    qmodel = calibrated(Padded(**settings), [X], qconfig(backend="onnxruntime"))
    parity = qmodel.export_onnx(X, tmp_path / "m.onnx", check=[X])
    assert parity is not None and parity.worst.max_difference <= EXACT
    assert op_types(tmp_path / "m.onnx")["Pad"] == 2
