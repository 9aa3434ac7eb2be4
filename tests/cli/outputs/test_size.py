"""Bytes of weights, counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsebit
from sparsebit.cli.outputs.size import WeightSize, weight_size


def size_of(model: nn.Module, weight: dict[str, Any], activation: dict[str, Any] | None = None) -> WeightSize:
    config = {"DEVICE": "cpu", "SCHEDULE": {"FUSE_BN": True}, "W": weight, "A": activation or {"QUANTIZER": {"BIT": 8}}}
    return weight_size(sparsebit.quantize(model.eval(), torch.randn(4, 5), config))


class Layer(nn.Module):
    """A linear layer as a module of a model, or as a function of its parameters."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, functional: bool = False) -> None:
        super().__init__()
        self.linear, self.functional = nn.Linear(inputs, outputs, bias=bias), functional

    def forward(self, x: Tensor) -> Tensor:
        if self.functional:
            return F.linear(x, weight=self.linear.weight, bias=self.linear.bias)
        return self.linear(x)


@pytest.mark.parametrize("functional", [False, True], ids=["module", "function"])
@pytest.mark.parametrize(("bits", "packed"), [(8, 35), (4, 18), (3, 14), (1, 5)])
def test_packed_without_gaps(bits: int, packed: int, functional: bool) -> None:
    size = size_of(Layer(5, 7, functional=functional), {"QUANTIZER": {"BIT": bits}})
    assert size == WeightSize(4 * (35 + 7), packed + 4 * 7 + 4 * 7)  # weights, scales, biases


def test_zero_points_take_bits_too() -> None:
    size = size_of(Layer(5, 7, bias=False), {"QSCHEME": "per-channel-affine", "QUANTIZER": {"BIT": 4}})
    assert size == WeightSize(4 * 35, 21 + 4 * 7)


def test_what_is_not_quantized_stays_float() -> None:
    assert size_of(Layer(5, 7), {"QUANTIZER": {"DISABLE": True, "BIT": 8}}) == WeightSize(168, 168)


def test_tied_weights_count_once() -> None:
    model = nn.Sequential(nn.Linear(5, 5, bias=False), nn.ReLU(), nn.Linear(5, 5, bias=False))
    model[2].weight = model[0].weight
    assert size_of(model, {"QUANTIZER": {"BIT": 8}}) == WeightSize(100, 25 + 20)


def test_learned_scales_of_activations_are_not_weights() -> None:
    activation = {"QUANTIZER": {"TYPE": "lsq", "BIT": 8}}
    assert size_of(Layer(5, 7), {"QUANTIZER": {"BIT": 8}}, activation).float_bytes == 168
