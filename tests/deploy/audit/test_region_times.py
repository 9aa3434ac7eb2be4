"""Times of fused regions by the runtimes' own clocks: which layers they name, not how long they take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import sparsebit
from sparsebit.deploy.audit.region_times import region_times

pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.GELU(), nn.Conv2d(8, 4, 1))
    path = tmp_path_factory.mktemp("regions") / "model.onnx"
    sparsebit.quantize(model.eval(), [torch.randn(8, 3, 12, 12)], "onnxruntime").export_onnx(
        torch.randn(1, 3, 12, 12), path
    )
    return path


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_regions_name_the_layers_of_the_model(file: Path, runtime: str) -> None:
    pytest.importorskip(runtime)
    times = region_times({"a": file, "b": file.read_bytes()}, runtime=runtime, num_rounds=3)
    assert times.keys() == {"a", "b"}
    for found in times.values():
        layers = found.by_layer()
        assert {"0", "2", "4"} <= layers.keys()
        assert all(found.of_layer(name) == pytest.approx(ms) for name, ms in layers.items())
        assert sum(layers.values()) + found.conversion_ms == pytest.approx(found.total_ms)
        assert found.num_rounds == 3 and found.runtime == runtime and found.to_dict()["regions"]


def test_conversions_belong_to_no_layer(file: Path) -> None:
    regions = region_times({"a": file}, num_rounds=2)["a"].regions
    left = [region for region in regions if not region.layers]
    assert {"QuantizeLinear", "DequantizeLinear"} <= {region.kernel for region in left}
    assert any(region.behind for region in left)
    integer = [region.layers for region in regions if region.kernel == "QLinearConv"]
    assert any("0" in layers for layers in integer)
