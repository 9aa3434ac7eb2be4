from __future__ import annotations

import pytest
import torch

from sparsebit.numerics.spec import PerChannel, PerTensor, TensorSpec
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.quantization.quantizers.registration import build_quantizer
from tests.quantization.tiny import qconfig, simulated, switched_on

X = torch.linspace(-15, 15, 301)


def pact(bits: int = 8, symmetric: bool = False, per_channel: bool = False) -> Quantizer:
    spec = TensorSpec(bits, symmetric, PerChannel(1) if per_channel else PerTensor())
    return build_quantizer("pact", spec, "activation", name="x", options=qconfig().A.QUANTIZER.PACT)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "affine"])
@pytest.mark.parametrize("data", [X, X.abs()], ids=["signed", "unsigned"])
def test_what_it_computes_is_what_its_numbers_say(bits: int, symmetric: bool, data: torch.Tensor) -> None:
    quantizer = switched_on(pact(bits, symmetric), data)
    torch.testing.assert_close(quantizer(X), simulated(quantizer, X), rtol=0, atol=1e-5)


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "affine"])
def test_the_threshold_is_the_grids_upper_end(symmetric: bool) -> None:
    quantizer = switched_on(pact(4, symmetric), X)
    low, high = (end.detach() for end in quantizer.dequantized_range())
    assert high == pytest.approx(10)
    assert low <= -10


def test_unsigned_data_uses_the_whole_grid() -> None:
    quantizer = switched_on(pact(), X.abs())
    assert quantizer.zero_point == 0 and quantizer.scale == pytest.approx(10 / 255)


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "affine"])
def test_the_gradient_of_the_threshold_is_that_of_the_clipped_values(symmetric: bool) -> None:
    """1 for each value above, about -1 for each below, 0 between; the values themselves the other way round."""
    quantizer = switched_on(pact(8, symmetric), X)
    x = torch.tensor([-12.0, -1.0, 3.0, 11.0, 12.0], requires_grad=True)
    quantizer(x).sum().backward()
    assert quantizer.alpha.grad == pytest.approx(2 - 1, abs=0.02)
    assert x.grad is not None and x.grad.tolist() == [0, 1, 1, 0, 0]


def test_per_channel_thresholds_are_learned_each() -> None:
    quantizer = pact(per_channel=True)
    alpha = quantizer.alpha
    switched_on(quantizer, torch.randn(2, 3, 4))
    assert quantizer.alpha is alpha and alpha.shape == (3,)
    x = torch.zeros(1, 3, 2)
    x[0, 1] = 20
    quantizer(x).sum().backward()
    assert alpha.grad is not None and alpha.grad.tolist() == [0, 2, 0]


def test_a_threshold_of_zero_stays_finite() -> None:
    quantizer = switched_on(pact(), X)
    with torch.no_grad():
        quantizer.alpha.zero_()
    assert quantizer(X).abs().max() < 1e-30
