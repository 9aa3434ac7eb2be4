from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sparsebit.errors import CalibrationError, CheckpointError
from sparsebit.execution.blocks.engine import BlockData
from sparsebit.execution.blocks.search import find_blocks
from sparsebit.quantization import QuantModel
from tests.quantization.tiny import qconfig

CONFIG = "{DEVICE: cpu, W: {QUANTIZER: {BIT: 4}}, A: {QUANTIZER: {BIT: 8}}}"


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


def calibrated(batches: Tensor) -> QuantModel:
    qmodel = QuantModel(model(), CONFIG, example_inputs=batches[0])
    qmodel.prepare_calibration()
    with torch.no_grad():
        for batch in batches:
            qmodel(batch)
    qmodel.calc_qparams()
    return qmodel


def test_targets_are_float_and_inputs_quantized() -> None:
    batches = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(0))
    qmodel, last = calibrated(batches), {}
    expected = model()

    def visit(data: BlockData) -> None:
        with torch.no_grad():
            last.update(targets=[v[0] for v in data.targets], outputs=[v[0] for v in data.outputs()])
            last.setdefault("names", []).append(data.block.name)

    qmodel.visit_blocks(list(batches), visit)
    assert not qmodel.is_quantized("weight")  # as it was
    with torch.no_grad():
        torch.testing.assert_close(last["targets"], [expected(x) for x in batches])
        qmodel.set_quant(w_quant=True, a_quant=True)
        torch.testing.assert_close(last["outputs"], [qmodel(x) for x in batches])
    assert last["names"] == ["0", "2", "4"]


@pytest.mark.parametrize("blocks", [None, ["layers.0", "layers.1"]], ids=["found", "named"])
def test_quantizers_of_a_blocks_inputs_belong_to_it(blocks: list[str] | None) -> None:
    """A tensor that several layers read is quantized once, by a node that is in no module of the traced model."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))
            self.layers, self.head = nn.ModuleList(layers), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.head(x.mean(1))

    x = torch.randn(2, 5, 8)
    qmodel = QuantModel(Encoder().eval(), "onnxruntime", example_inputs=x)
    found = find_blocks(qmodel.model, blocks)
    assert [block.name for block in found][:2] == ["layers.0", "layers.1"]
    assert [(len(block.inputs), len(block.outputs)) for block in found[:2]] == [(1, 1), (1, 1)]
    assert found[1].inputs == found[0].outputs and found[1].nodes[0].name == "layers_0_norm2_shared"


def test_a_run_resumes_with_equal_bits(tmp_path: Path) -> None:
    batches = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))

    def run(folder: Path | None, stop_at: str = "") -> dict[str, Tensor]:
        torch.manual_seed(3)
        qmodel = calibrated(batches)

        def visit(data: BlockData) -> None:
            if data.block.name == stop_at:
                raise KeyboardInterrupt
            layer = next(iter(data.block.modules.values()))
            with torch.no_grad():
                layer.bias.add_(torch.rand_like(layer.bias) + data.inputs[0][0].mean())

        qmodel.visit_blocks(list(batches), visit, resume=folder)
        return {name: tensor.clone() for name, tensor in qmodel.model.state_dict().items() if "bias" in name}

    whole = run(None)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "kept", stop_at="2")
    resumed = run(tmp_path / "kept")
    assert whole and all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())
    batches += 1
    with pytest.raises(CheckpointError, match="differ"):
        run(tmp_path / "kept")


def test_no_batches() -> None:
    qmodel = calibrated(torch.randn(1, 5, 6))
    with pytest.raises(CalibrationError, match="no batch"):
        qmodel.visit_blocks([], lambda data: None)


def test_a_model_that_is_not_calibrated() -> None:
    qmodel = QuantModel(nn.Sequential(nn.Linear(4, 4)), qconfig())
    with pytest.raises(CalibrationError, match=r"^visit_blocks\(\): the model is not calibrated"):
        qmodel.visit_blocks([torch.randn(2, 4)], lambda data: None)
