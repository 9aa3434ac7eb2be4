from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.quantization import QuantModel
from sparsebit.quantization.building.parameter_sites import owned_parameters, quantizers_of_parameters
from tests.quantization.tiny import Opaque, qconfig


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.weight, self.token = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(1, 6))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x + self.token, self.inner.weight * self.scale)


def test_names_are_those_of_the_original() -> None:
    for model in (nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.PReLU()), Functional(), Opaque()):
        qmodel = QuantModel(model, qconfig())
        assert {p.full_name for p in owned_parameters(qmodel.model)} == {name for name, _ in model.named_parameters()}


def test_learned_scales_are_not_parameters_of_the_model() -> None:
    qmodel = QuantModel(nn.Sequential(nn.Linear(3, 3)), qconfig({"W.QUANTIZER.TYPE": "lsq"}))
    assert [p.full_name for p in owned_parameters(qmodel.model)] == ["0.weight", "0.bias"]


def test_a_weight_is_what_reaches_a_quantizer_without_an_input() -> None:
    qmodel = QuantModel(Functional(), qconfig())
    quantizers = quantizers_of_parameters(qmodel.model)
    names = {p.full_name: quantizers.get(id(p.parameter)) for p in owned_parameters(qmodel.model)}
    assert names["inner.weight"] is not None and names["inner.weight"].target == "weight"
    assert names["scale"] is names["inner.weight"] and names["token"] is None
