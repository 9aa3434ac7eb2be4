from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from sparsebit.errors import ConfigError
from sparsebit.quantization import QuantModel, correct_biases, gptq
from sparsebit.quantization.ops.quant_opr import WeightedQuantOpr
from tests.quantization import tiny

CONFIG = "{DEVICE: cpu, W: {QUANTIZER: {BIT: 3}}, A: {QUANTIZER: {BIT: 8}}}"
METHODS: list[Literal["empirical", "analytic"]] = ["empirical", "analytic"]


def float_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 8, 2, stride=2, groups=2),
        nn.ReLU(),
        nn.Conv2d(8, 6, 3, stride=2, groups=2, bias=False),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 4),
    ).eval()


def batches(count: int = 3) -> list[Tensor]:
    return list(torch.rand(count, 8, 3, 10, 10, generator=torch.Generator().manual_seed(0)))


def calibrated(data: list[Tensor], config: Any = CONFIG) -> QuantModel:
    return tiny.calibrated(float_model(), data, config, example_inputs=data[0])


def shift(qmodel: QuantModel, data: list[Tensor]) -> float:
    """The largest difference of the mean outputs."""
    model = float_model()
    with torch.no_grad():
        return float(torch.cat([qmodel(x) - model(x) for x in data]).mean(0).abs().max())


@pytest.mark.parametrize("method", METHODS)
def test_the_mean_output_comes_back(method: Literal["empirical", "analytic"]) -> None:
    data = batches()
    qmodel = calibrated(data)
    before = shift(qmodel, data)
    found = correct_biases(qmodel, data, method=method)
    assert list(found) == ["0", "2", "4", "9"] and all(size > 0 for size in found.values())
    assert shift(qmodel, data) < (0.01 if method == "empirical" else 1) * before


def test_analytic_is_what_one_layers_rounding_shifts() -> None:
    """With one layer quantized, and its input in float, both methods are the same."""
    data = batches()
    config = {
        "DEVICE": "cpu",
        "W": {"QUANTIZER": {"DISABLE": True}, "SPECIFIC": [{"2": ["QUANTIZER.DISABLE", False, "QUANTIZER.BIT", 3]}]},
        "A": {"QUANTIZER": {"DISABLE": True}},
    }
    biases = []
    for method in METHODS:
        qmodel = calibrated(data, config)
        correct_biases(qmodel, data, method=method)
        layer = next(m for n, m in qmodel.model.named_modules() if n == "2" and isinstance(m, WeightedQuantOpr))
        biases.append(layer.op.bias.detach().clone())
    torch.testing.assert_close(*biases)
    assert not torch.allclose(biases[0], float_model()[2].bias)


@pytest.mark.parametrize("method", METHODS)
def test_repeatable_resumable_and_saved(method: Literal["empirical", "analytic"], tmp_path: Path) -> None:
    data = batches()
    states = []
    for folder in (None, tmp_path / "kept", tmp_path / "kept"):
        qmodel = calibrated(data)
        correct_biases(qmodel, data, method=method, resume=folder)
        states.append(qmodel.state_dict())
    assert all(torch.equal(state[name], tensor) for name, tensor in states[0].items() for state in states[1:])
    qmodel.save(tmp_path / "saved")
    again = QuantModel.load(tmp_path / "saved", float_model())
    with torch.no_grad():
        assert torch.equal(again(data[0]), qmodel(data[0]))


def test_with_gptq_and_exported(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    data = batches()
    qmodel = calibrated(data, "{BACKEND: onnxruntime, DEVICE: cpu, W: {QUANTIZER: {BIT: 8}}, A: {QUANTIZER: {BIT: 8}}}")
    gptq(qmodel, data, correct_bias=False)
    correct_biases(qmodel, data, method="empirical")
    assert qmodel.export_onnx(data[0], tmp_path / "m.onnx", check=data) is not None


def test_biases_of_several_layers_stay() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
            self.two.bias = self.one.bias

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.one(x))
            return self.head(torch.relu(self.two(x)) + torch.relu(self.two(2 * x)))

    torch.manual_seed(0)
    data = list(torch.randn(2, 16, 6))
    qmodel = QuantModel(Tied().eval(), CONFIG, example_inputs=data[0])
    qmodel.prepare_calibration()
    with torch.no_grad():
        for batch in data:
            qmodel(batch)
    qmodel.calc_qparams()
    assert list(correct_biases(qmodel, data)) == ["head"]


@pytest.mark.parametrize("first", METHODS)
@pytest.mark.parametrize("second", METHODS)
def test_a_second_correction_takes_the_place_of_the_first(
    first: Literal["empirical", "analytic"], second: Literal["empirical", "analytic"]
) -> None:
    data = batches()
    once, twice = calibrated(data), calibrated(data)
    correct_biases(once, data, method=second)
    correct_biases(twice, data, method=first)
    correct_biases(twice, data, method=second)
    for name, tensor in once.state_dict().items():
        torch.testing.assert_close(twice.state_dict()[name], tensor, msg=name)


def test_analytic_leaves_what_gptq_made_of_the_biases() -> None:
    data = batches()
    qmodel = calibrated(data)
    gptq(qmodel, data)
    before = {name: tensor.clone() for name, tensor in qmodel.state_dict().items()}
    correct_biases(qmodel, data, method="analytic")
    for name, tensor in qmodel.state_dict().items():
        torch.testing.assert_close(tensor, before[name], msg=name)


def test_an_unknown_method() -> None:
    data = batches(1)
    with pytest.raises(ConfigError, match="allowed: empirical, analytic"):
        correct_biases(calibrated(data), data, method="other")  # type: ignore[arg-type]
