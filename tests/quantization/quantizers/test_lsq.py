from __future__ import annotations

import pytest
import torch
from torch import nn

from sparsebit.numerics.spec import PerChannel, PerTensor, TensorSpec
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.quantization.quantizers.registration import build_quantizer
from tests.quantization.tiny import simulated, switched_on


def lsq(kind: str = "lsq", *, symmetric: bool = False, channels: int = 1) -> Quantizer:
    spec = TensorSpec(4, symmetric, PerTensor() if channels == 1 else PerChannel(0))
    return build_quantizer(kind, spec, "weight", name="w", num_scales=channels)


@pytest.mark.parametrize(("kind", "symmetric", "learned"), [
    ("lsq", False, {"scale"}), ("lsq", True, {"scale"}), ("lsq+", False, {"scale", "zero_point"}),
    ("lsq+", True, {"scale"}),
])  # fmt: skip
def test_learned_numbers_are_parameters_from_construction(kind: str, symmetric: bool, learned: set[str]) -> None:
    quantizer = lsq(kind, symmetric=symmetric, channels=3)
    assert {name for name, _ in quantizer.named_parameters()} == learned
    assert all(isinstance(p, nn.Parameter) and p.shape == (3,) for p in quantizer.parameters())
    before = {name: id(parameter) for name, parameter in quantizer.named_parameters()}
    switched_on(quantizer, torch.randn(3, 20))
    assert {name: id(parameter) for name, parameter in quantizer.named_parameters()} == before


def test_the_gradient_of_the_scale() -> None:
    quantizer = switched_on(lsq(symmetric=True), torch.tensor([-8.0, 7.0]))
    x = torch.tensor([0.3, 2.6, 100.0, -100.0])
    quantizer(x).sum().backward()
    # inside: round(v) - v; outside: the end of the grid; times 1/sqrt(N * qmax)
    expected = ((0 - 0.3) + (3 - 2.6) + 7 - 8) / (4 * 7) ** 0.5
    assert quantizer.scale.grad == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["lsq", "lsq+"])
def test_a_scale_across_zero_keeps_computing(kind: str) -> None:
    quantizer = switched_on(lsq(kind), torch.randn(50))
    x = torch.randn(9)
    before = quantizer(x)
    with torch.no_grad():
        quantizer.scale.neg_()
    assert torch.equal(quantizer(x), before)
    assert torch.equal(quantizer(x), simulated(quantizer, x))


def test_a_zero_point_that_walks_off_the_grid_is_held() -> None:
    quantizer = switched_on(lsq("lsq+"), torch.randn(50))
    with torch.no_grad():
        quantizer.zero_point.fill_(99.0)
    x = torch.randn(9)
    assert quantizer.qparams()[1] == 15
    assert torch.equal(quantizer(x), simulated(quantizer, x))
