"""A tiny network, its data, and every way to train it with quantization."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.quantization import QuantModel
from tests.quantization.tiny import prepared, qconfig

# name -> (changes of the config, whether ranges follow the data)
WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "lsq": ({"W.QUANTIZER.TYPE": "lsq", "A.QUANTIZER.TYPE": "lsq"}, False),
    "lsq+": ({"W.QUANTIZER.TYPE": "lsq+", "A.QUANTIZER.TYPE": "lsq+"}, False),
    "pact": ({"A.QUANTIZER.TYPE": "pact", "A.QUANTIZER.PACT": {"ALPHA_VALUE": 3.0}}, False),
    "dorefa": ({"W.QUANTIZER.TYPE": "dorefa"}, False),
    "fixed": ({}, False),
    "following": ({}, True),
}
# For tests that compile or export: two of them in every run, the others among the slow tests.
SOME_WAYS = [way if way in ("lsq", "following") else pytest.param(way, marks=pytest.mark.slow) for way in WAYS]


class Net(nn.Module):
    """Two convolutions with batch norms, of which one has a negative gamma, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6)
        self.fc = nn.Linear(6, 3)
        with torch.no_grad():
            self.bn1.weight.copy_(torch.tensor([1.0, -0.7, 0.4, 1.6]))
            self.bn2.weight.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


def data(num: int = 24) -> tuple[Tensor, Tensor]:
    """Three kinds of stripes and noise."""
    labels = torch.arange(num) % 3
    x = 0.3 * torch.randn(num, 1, 8, 8)
    x[labels == 0, :, ::2] += 1
    x[labels == 1, :, :, ::2] += 1
    return x, labels


def ready(way: str = "lsq", changes: dict[str, Any] | None = None, *, bits: int = 4, **settings: Any) -> QuantModel:
    """A model in train mode, behind `init_QAT`; the same at every call."""
    config, follow = WAYS[way]
    torch.manual_seed(0)
    qmodel = prepared(Net(), data()[0].split(8), qconfig({**config, **(changes or {})}, bits=bits, **settings))
    qmodel.init_QAT(follow_ranges=follow)
    return qmodel.train()


def train(model: nn.Module, num_steps: int = 3, lr: float = 0.02) -> nn.Module:
    """A few steps of Adam on batches that differ."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr)
    for _ in range(num_steps):
        x, labels = data()
        optimizer.zero_grad()
        F.cross_entropy(model(x).float(), labels).backward()
        optimizer.step()
    return model


def numbers(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all that the state_dict holds."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same(one: nn.Module, other: nn.Module) -> None:
    """All parameters and buffers are equal bit by bit."""
    left, right = one.state_dict(), other.state_dict()
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []
