"""Float layers whose batch norm the exporter multiplies into the stored numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from sparsebit.errors import DeploymentError
from tests.deploy.exported_files import initializers
from tests.quantization.tiny import calibrated, qconfig

X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def float_layer_and_norm(layer: nn.Module, num_features: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(num_features)
    for values in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
        assert values is not None
        nn.init.uniform_(values, 0.3, 1.7)
    return nn.Sequential(layer, norm, nn.Conv2d(num_features, 2, 1)).eval()


LAYERS = [nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3, bias=False), nn.ConvTranspose2d(3, 4, 2)]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_a_batch_norm_in_a_float_layer_is_no_difference(layer: nn.Module, tmp_path: Path) -> None:
    off = [{"0": ["QUANTIZER.DISABLE", True]}]
    config = {"W.SPECIFIC": off, "A.SPECIFIC": off, "SCHEDULE.FUSE_BN": False}
    qmodel = calibrated(float_layer_and_norm(layer), [X], qconfig(config, backend="virtual"))
    file = tmp_path / "m.onnx"
    qmodel.export_onnx(X, file, check=[X])
    folded = [name for name, value in initializers(file).items() if name.endswith("0.weight") and value.ndim == 4]
    assert folded, "the exporter keeps batch norms now: remove `_is_folded`"
    with torch.no_grad():
        qmodel.get_parameter(folded[0].removeprefix("module."))[0, 0, 0, 0] *= 1.01
    with pytest.raises(DeploymentError, match="it stores other numbers"):
        qmodel.check_onnx(file, [X])
