"""Calls that take another path than the captured one are compared with the model's own code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sparsebit.errors import CaptureError
from sparsebit.quantization import QuantModel, apply_algorithms
from tests.quantization.tiny import calibrated, qconfig

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Folded(nn.Module):
    """The norm follows the layer on the captured path alone, and for two images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        with torch.no_grad():
            self.norm.running_mean.uniform_()  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return x if x.shape[0] == 1 else self.norm(x) if x.shape[0] > 2 else self.norm(x) + 1.0


class Merged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.narrow(x) if x.shape[0] == 1 else self.wide(x) + self.narrow(x)
        return y if x.shape[0] > 2 else y + 1.0


@pytest.mark.parametrize("make", [Folded, Merged])
def test_folded_layers_that_another_path_calls_alone_are_refused_before_and_after_loading(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = make().eval()
    built = calibrated(model, [X], qconfig(backend="onnxruntime"), example_inputs=(X,))
    built.save(tmp_path / "saved")
    with torch.no_grad():
        for qmodel in (built, QuantModel.load(tmp_path / "saved", make())):
            torch.testing.assert_close(qmodel(X[:2]), model(X[:2]), rtol=0, atol=0.1)  # as on the captured path
            with pytest.raises(CaptureError, match="computes something else when its layers are quantized or folded"):
                qmodel(X[:1])


class TwoReaders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1)
        with torch.no_grad():
            self.conv.weight.mul_(torch.logspace(-2, 2, 8).reshape(-1, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv(x))
        y: Tensor = self.first(x) if x.shape[0] > 2 else self.second(x)
        return y


@pytest.mark.parametrize("algorithm", ["equalize", "smooth"])
def test_paths_whose_layers_were_not_rescaled_are_refused(algorithm: str, tmp_path: Path) -> None:
    config = qconfig({"ALGORITHMS": [algorithm]}, backend="onnxruntime")
    built = calibrated(TwoReaders().eval(), [X], config, example_inputs=(X,))
    apply_algorithms(built, [X])
    built.save(tmp_path / "saved")
    for qmodel in (built, QuantModel.load(tmp_path / "saved", TwoReaders())):
        with pytest.raises(CaptureError, match=f"{algorithm} rescaled layers"):
            qmodel(X[:1])
