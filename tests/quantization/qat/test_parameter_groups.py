from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.quantization.tiny import Block, prepared, qconfig
from tests.quantization.tiny_training import WAYS, ready


def named(groups: list[dict[str, Any]]) -> dict[str, set[str]]:
    return {group["name"]: set(group["param_names"]) for group in groups}


@pytest.mark.parametrize("way", WAYS)
def test_every_trainable_parameter_is_there_once(way: str) -> None:
    qmodel = ready(way)
    found = [parameter for group in qmodel.parameter_groups() for parameter in group["params"]]
    assert sorted(map(id, found)) == sorted(id(p) for p in qmodel.parameters() if p.requires_grad)


def test_kinds() -> None:
    groups = named(ready("lsq+").parameter_groups())
    assert groups["weights"] == {"model.conv1.op.weight", "model.conv2.op.weight", "model.fc.op.weight"}
    assert groups["biases"] >= {"model.bn1.weight", "model.bn1.bias", "model.fc.op.bias"}
    assert {name.rpartition(".")[2] for name in groups["scales"]} == {"scale", "zero_point"}
    assert all("_quantizer." in name for name in groups["scales"])
    assert {n.rpartition(".")[2] for n in named(ready("pact").parameter_groups())["scales"]} == {"alpha"}


def test_names_belong_to_their_parameters() -> None:
    qmodel = ready()
    parameters = dict(qmodel.named_parameters())
    for group in qmodel.parameter_groups():
        assert all(parameters[name] is p for name, p in zip(group["param_names"], group["params"], strict=True))


class Shaped(nn.Module):
    """A norm over a whole image, a bias of four dimensions, tied weights and a bare vector."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm([3, 4, 4])
        self.channel_bias, self.gain = nn.Parameter(torch.zeros(1, 3, 1, 1)), nn.Parameter(torch.ones(3))
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = (self.norm(x) + self.channel_bias) * self.gain.reshape(3, 1, 1)
        return self.frozen(self.second(self.first(x)))


def test_shapes_do_not_mislead() -> None:
    qmodel = prepared(Shaped(), [torch.randn(2, 3, 4, 4)], qconfig({"W.QUANTIZER.TYPE": "lsq"}))
    qmodel.init_QAT()
    groups = named(qmodel.parameter_groups())
    assert len(groups["weights"]) == 1  # tied
    assert {name.rpartition(".")[2] for name in groups["biases"]} == {"weight", "bias", "channel_bias", "gain"}
    assert not any("frozen.op" in name for names in groups.values() for name in names)


def test_numbers_of_the_groups() -> None:
    groups = {g["name"]: g for g in ready().parameter_groups(0.1, scale_lr=0.01, weight_decay=0.5)}
    assert {n: (g["lr"], g["weight_decay"]) for n, g in groups.items()} == {
        "weights": (0.1, 0.5),
        "biases": (0.1, 0.0),
        "scales": (0.01, 0.0),
    }
    assert {g["lr"] for g in ready().parameter_groups(0.1)} == {0.1}


def test_what_is_not_said_is_the_optimizers() -> None:
    optimizer = torch.optim.AdamW(ready().parameter_groups(), lr=0.3, weight_decay=0.2)
    assert {g["name"]: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups} == {
        "weights": (0.3, 0.2),
        "biases": (0.3, 0.0),
        "scales": (0.3, 0.0),
    }


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RAdam, torch.optim.NAdam])
def test_optimizers_take_them(kind: type[torch.optim.Optimizer]) -> None:
    qmodel = ready()
    optimizer = kind(qmodel.parameter_groups(0.01, weight_decay=1e-4))
    qmodel(torch.randn(2, 1, 8, 8)).sum().backward()
    optimizer.step()
    fresh = kind(qmodel.parameter_groups(0.01))
    fresh.load_state_dict(optimizer.state_dict())
    assert [g["param_names"] for g in fresh.param_groups] == [g["param_names"] for g in optimizer.param_groups]


def test_frozen_scales_and_empty_groups_are_left_out() -> None:
    qmodel = ready()
    qmodel.freeze("scales")
    assert set(named(qmodel.parameter_groups())) == {"weights", "biases"}


def test_transformer() -> None:
    qmodel = prepared(Block(), [torch.randn(2, 3, 8, 8)], qconfig({"A.QUANTIZER.TYPE": "lsq"}))
    qmodel.init_QAT()
    groups = named(qmodel.parameter_groups())
    assert len(groups["weights"]) == 5 and not any("norm" in name for name in groups["weights"])
