"""Every verb on the module of a file: the names of the file stay, and the new file computes what is simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

import sparsebit
from sparsebit.deploy.loading.load_onnx import load_onnx
from sparsebit.quantization import QuantModel
from sparsebit.quantization.algorithms.rounding.reconstruction import reconstruct
from tests.deploy.loading.test_load_onnx import case, exported
from tests.parameters import first_fast

WAYS = [("conv", 18, True), ("attention", 21, True), ("conv", 11, False), ("attention", 13, False)]
LAYERS = (nn.Conv2d, nn.ConvTranspose2d, nn.Linear, nn.Embedding)


def config(**more: Any) -> dict[str, Any]:
    return {**sparsebit.PROFILES["onnxruntime"].recommended(), "DEVICE": "cpu", **more}


@pytest.mark.filterwarnings("ignore::UserWarning")  # few samples: that is not the point here
@pytest.mark.parametrize(("kind", "opset", "dynamo"), first_fast(WAYS, 0))
def test_rounding_saving_and_exporting_keep_the_names(kind: str, opset: int, dynamo: bool, tmp_path: Path) -> None:
    net, x = case(kind)
    batches = [torch.cat([x, x.flip(0)]), torch.cat([x.flip(-1), x])]
    model = load_onnx(exported(net, x, tmp_path / "net.onnx", opset, dynamo=dynamo), batches)
    names = {name for name, module in model.named_modules() if isinstance(module, LAYERS)}
    assert names == {name for name, module in net.named_modules() if isinstance(module, LAYERS)}
    qmodel = sparsebit.quantize(model, batches, config(ALGORITHMS=["gptq"]))
    reconstruct(qmodel, batches, steps=2)
    quantized = {site.removesuffix(".weight") for site in qmodel.plan.sites if site.endswith(".weight")}
    assert quantized == names - {"up"}  # the profile leaves transposed convolutions in float
    qmodel.save(tmp_path / "saved")
    again = QuantModel.load(tmp_path / "saved", load_onnx(tmp_path / "net.onnx", batches))
    with torch.no_grad():
        assert torch.equal(again(x), qmodel(x))
    parity = again.export_onnx(x, tmp_path / "int8.onnx", check=batches)
    assert parity is not None and parity.worst.max_difference < 1e-6
    assert quantized <= {node.name for node in onnx.load(tmp_path / "int8.onnx").graph.node}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_layers_placed_by_measurement(tmp_path: Path) -> None:
    net, x = case("conv")
    model = load_onnx(exported(net, x, tmp_path / "net.onnx", 18), [x])
    qmodel = sparsebit.quantize(model, [x], config(), placement="measured", placement_seconds=3.0)
    parity = qmodel.export_onnx(x, tmp_path / "int8.onnx", check=[x])
    assert parity is not None and parity.worst.max_difference < 1e-6


def test_a_recurrent_file_is_quantized_around_its_layer(tmp_path: Path) -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.LSTM(8, 6, bidirectional=True, batch_first=True), nn.Linear(12, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.inner(x)[0])

    x = torch.randn(2, 5, 8)
    net = Tagger()
    model = load_onnx(exported(net, x, tmp_path / "net.onnx", 17, dynamo=False), [x])
    qmodel = sparsebit.quantize(model, [x, x.flip(0)], config())
    assert "head.weight" in qmodel.plan.sites
    parity = qmodel.export_onnx(x, tmp_path / "int8.onnx", check=[x])
    assert parity is not None and parity.worst.max_difference < 1e-4
