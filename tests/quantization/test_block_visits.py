from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sparsebit.errors import CalibrationError, CheckpointError
from sparsebit.execution.block_engine import BlockData
from sparsebit.quantization import QuantModel

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
