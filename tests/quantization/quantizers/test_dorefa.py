from __future__ import annotations

import torch

from sparsebit.numerics.spec import PerChannel, TensorSpec
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.quantization.quantizers.registration import build_quantizer
from tests.quantization.tiny import simulated


def dorefa(weight: torch.Tensor) -> Quantizer:
    quantizer = build_quantizer(
        "dorefa", TensorSpec(4, True, PerChannel(0)), "weight", name="w", num_scales=len(weight)
    )
    quantizer.update_observer(weight)
    quantizer.calc_qparams()
    quantizer.enable_quant()
    return quantizer


def test_tanh_is_part_of_what_is_quantized() -> None:
    weight = torch.randn(3, 20)
    quantizer = dorefa(weight).eval()
    assert torch.equal(quantizer(weight), simulated(quantizer, weight.tanh()))
    assert quantizer.dequantized_range()[1].max() <= 1


def test_in_training_the_grid_follows_the_weight() -> None:
    weight = torch.nn.Parameter(torch.randn(3, 20))
    quantizer = dorefa(weight).train()
    scale = quantizer.scale.clone()
    with torch.no_grad():
        weight.mul_(0.1)
    output = quantizer(weight)
    assert bool((quantizer.scale < scale).all())
    output.square().sum().backward()
    assert weight.grad is not None and bool((weight.grad != 0).any())
    assert torch.equal(quantizer.eval()(weight), output)


def test_in_eval_mode_the_grid_stays() -> None:
    weight = torch.randn(3, 20)
    quantizer = dorefa(weight).eval()
    scale = quantizer.scale.clone()
    quantizer(weight * 0.1)
    assert torch.equal(quantizer.scale, scale)
