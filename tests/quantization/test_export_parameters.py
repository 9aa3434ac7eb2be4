"""Files of models whose weights are read by own code: integers and a DequantizeLinear in front of the float op."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sparsebit.errors import DeploymentError
from sparsebit.quantization import QuantModel
from tests.quantization.tiny import calibrated, qconfig, sites

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(layer.hidden_size * (1 + layer.bidirectional), 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0])


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, 10))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x.unsqueeze(0).expand(4, -1, -1), self.weight).sum(0)


def exported(model: nn.Module, x: Tensor, file: Path, bits: int = 8) -> QuantModel:
    torch.manual_seed(0)
    config = qconfig({"W.QUANTIZER.BIT": bits, "A.QUANTIZER.DISABLE": bits != 8}, backend="onnxruntime")
    qmodel = calibrated(model.eval(), [x], config, example_inputs=x)
    parity = qmodel.export_onnx(x, file, check=[x])
    assert parity is not None and parity.worst.max_difference < 1e-6
    return qmodel


def integer_initializers(file: Path) -> set[str]:
    integers = (onnx.TensorProto.INT8, onnx.TensorProto.INT4, onnx.TensorProto.UINT8)
    weights = [i for i in onnx.load(file).graph.initializer if i.data_type in integers and len(i.dims) > 1]
    return {initializer.name.partition("/")[0] for initializer in weights}


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("layer", [nn.LSTM(5, 6, batch_first=True), nn.GRU(5, 6, 2, bidirectional=True)])
def test_recurrent_weights_are_integers_in_the_file(layer: nn.Module, bits: int, tmp_path: Path) -> None:
    qmodel = exported(Recurrent(layer), torch.randn(3, 4, 5), tmp_path / "a.onnx", bits)
    assert {name for name in sites(qmodel) if "layer" in name} <= integer_initializers(tmp_path / "a.onnx")


@pytest.mark.slow
def test_stacks_are_integers_in_the_file(tmp_path: Path) -> None:
    exported(Products(), torch.randn(5, 6), tmp_path / "a.onnx")
    assert integer_initializers(tmp_path / "a.onnx") == {"weight"}


def test_projections_are_refused(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(5, 6, proj_size=3)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x)[0]

    x = torch.randn(3, 4, 5)
    qmodel = calibrated(Net().eval(), [x], qconfig(backend="onnxruntime"))
    with pytest.raises(DeploymentError, match="lstm is an LSTM with proj_size=3"):
        qmodel.export_onnx(x, tmp_path / "a.onnx")


def test_tensorrt_keeps_them_in_float() -> None:
    coverage = QuantModel(Recurrent(nn.LSTM(5, 6)), qconfig(backend="tensorrt")).coverage
    assert "tensorrt takes quantized weights in its integer layers only" in str(coverage)
