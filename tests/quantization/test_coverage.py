from __future__ import annotations

import json

import torch
from torch import Tensor, nn

from sparsebit.quantization import QuantModel
from tests.quantization.tiny import Opaque, Residual, calibrated, qconfig


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front, self.middle, self.tail = nn.Linear(6, 6), Opaque(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x + 1
        return self.tail(torch.erf(self.middle(self.front(x))))


def test_what_is_quantized_with_its_formats() -> None:
    coverage = QuantModel(Residual(), qconfig({"A.QADD.ENABLE_QUANT": True, "W.QUANTIZER.BIT": 4})).coverage
    layers = {layer.name: layer for layer in coverage.quantized}
    assert layers["stem.conv"].op == "QConv2d"
    assert layers["stem.conv"].sites == {"input": "uint8", "weight": "int4"}
    assert layers["stem.relu"].sites == {"shared": "uint8"}
    assert layers["add"].sites == {"input.0": "uint8"}
    assert (coverage.num_weighted_quantized, coverage.num_weighted, coverage.weighted_fraction) == (3, 3, 1.0)


def test_text() -> None:
    text = str(QuantModel(Mixed(), qconfig()).coverage)
    lines = text.splitlines()
    assert lines[0] == "4 of 4 weighted layers quantized, 4 layers in all"
    assert "  float    erf: unknown op erf: passes through in float (register_qmodule teaches it)" in lines
    (untraced,) = [line for line in lines if line.startswith("  untraced")]
    assert untraced.startswith("  untraced middle [Opaque]: ")
    assert any("tiny.py:" in line and "float(x.abs().max())" in line for line in lines)
    assert "           quantized inside: middle.first, middle.second" in lines
    assert any(line.startswith("  note     (model) branches on self.training") for line in lines)


def test_dict_goes_to_json() -> None:
    coverage = calibrated(Mixed(), [torch.randn(4, 6)]).coverage
    values = json.loads(json.dumps(coverage.to_dict()))
    assert values["weighted_fraction"] == 1.0
    assert {layer["name"] for layer in values["quantized"]} == {"front", "middle.first", "middle.second", "tail"}
    assert values["opaque"][0]["quantized_inside"] == ["middle.first", "middle.second"]


def test_an_opaque_model_says_so_at_its_root() -> None:
    (module,) = QuantModel(Opaque(), qconfig()).coverage.opaque
    assert module.path == "" and module.quantized_inside == ("first", "second")
    assert "untraced (model) [Opaque]" in str(QuantModel(Opaque(), qconfig()).coverage)


def test_a_model_without_weights() -> None:
    coverage = QuantModel(nn.Sequential(nn.ReLU()), qconfig()).coverage
    assert coverage.num_weighted == 0 and coverage.weighted_fraction == 0.0
