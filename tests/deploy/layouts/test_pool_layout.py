from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.deploy.exported_files import EXACT, op_types, optimized_ops, worst
from tests.quantization.tiny import calibrated, qconfig

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Pooled(nn.Module):
    def __init__(self, pool: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.pool, self.head = nn.Conv2d(3, 8, 3), pool, nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.conv(x).relu()).flatten(1))


@pytest.mark.parametrize("dynamic", [None, {"x": {0: "batch"}}], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("pool", [
    nn.AdaptiveAvgPool2d(1), lambda x: x.mean((2, 3), keepdim=True), lambda x: x.mean((2, 3)),
    lambda x: x.mean((-1, -2)),
], ids=["module", "kept", "dropped", "from_behind"])  # fmt: skip
@pytest.mark.sample(2)
def test_a_global_average_pool_runs_in_integers(
    pool: Callable[[Tensor], Tensor], dynamic: dict[str, dict[int, str]] | None, tmp_path: Path
) -> None:
    qmodel = calibrated(Pooled(pool), [X], qconfig(backend="onnxruntime"))
    parity = qmodel.export_onnx(X, tmp_path / "m.onnx", dynamic_axes=dynamic, check=[X])
    assert parity is not None and parity.worst.max_difference <= EXACT
    ops = optimized_ops(tmp_path / "m.onnx", tmp_path)
    assert ops["QLinearGlobalAveragePool"] == 1 and ops["QGemm"] == 1 and "ReduceMean" not in ops


@pytest.mark.parametrize(
    "pool", [lambda x: x.mean((1, 3)), lambda x: x.mean(1, keepdim=True), lambda x: x.mean((1, 2))[:, :8]]
)
def test_other_means_stay_what_they_are(pool: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), Mean(pool))
    qmodel = calibrated(model, [X], qconfig(backend="onnxruntime"))
    qmodel.export_onnx(X, tmp_path / "m.onnx")
    assert "GlobalAveragePool" not in op_types(tmp_path / "m.onnx")
    assert worst(qmodel, tmp_path / "m.onnx", X) <= 1e-2  # one step of the convolution's output, at most


class Mean(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize("pool", [nn.AvgPool2d(2, ceil_mode=True), nn.AvgPool2d((3, 2), 2, ceil_mode=True)], ids=str)
def test_an_average_that_reaches_over_the_edge(pool: nn.Module, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 2), pool)  # on 7x7
    parity = calibrated(model, [X], qconfig(backend="onnxruntime")).export_onnx(X, tmp_path / "m.onnx", check=[X])
    assert parity is not None and parity.worst.sqnr_db > 40
    assert optimized_ops(tmp_path / "m.onnx", tmp_path)["QLinearAveragePool"] == 1
