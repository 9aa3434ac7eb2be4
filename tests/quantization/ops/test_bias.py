from __future__ import annotations

import torch
from torch import Tensor, nn

from sparsebit.quantization import QuantModel
from sparsebit.quantization.ops.bias import INT32, LARGEST_BIAS, BiasRounding
from tests.quantization.tiny import calibrated, qconfig, site


def layer(model: nn.Module, x: Tensor, backend: str = "onnxruntime") -> tuple[QuantModel, BiasRounding | None]:
    qmodel = calibrated(model, [x], qconfig(backend=backend))
    roundings = [module for module in qmodel.modules() if isinstance(module, BiasRounding)]
    return qmodel, roundings[0] if roundings else None


def test_a_bias_lies_on_the_grid_of_input_times_weight() -> None:
    model = nn.Sequential(nn.Linear(6, 4))
    qmodel, rounding = layer(model, torch.randn(8, 6))
    assert rounding is not None
    step = site(qmodel, "0.input").scale * site(qmodel, "0.weight").scale
    rounded, bias = rounding(model[0].bias).detach(), model[0].bias.detach()
    codes = rounded / step
    assert torch.allclose(codes, codes.round(), atol=1e-3)
    assert float(((rounded - bias) / step).abs().max()) <= 0.5001
    assert torch.allclose(rounding.scale(), step)


def test_it_rests_in_training_and_where_a_quantizer_is_off() -> None:
    model = nn.Sequential(nn.Linear(6, 4))
    qmodel, rounding = layer(model, torch.randn(8, 6))
    assert rounding is not None and rounding.is_enable
    bias = model[0].bias
    assert rounding.train()(bias) is bias
    rounding.eval()
    qmodel.set_quant(w_quant=True, a_quant=False)
    assert rounding(bias) is bias


def test_gradients_pass_through() -> None:
    _, rounding = layer(nn.Sequential(nn.Linear(6, 4)), torch.randn(8, 6))
    assert rounding is not None
    bias = torch.randn(4, requires_grad=True)
    rounding(bias).sum().backward()
    assert torch.equal(bias.grad if bias.grad is not None else torch.zeros(4), torch.ones(4))


def test_backends_that_add_biases_in_float_have_none() -> None:
    assert layer(nn.Sequential(nn.Linear(6, 4)), torch.randn(8, 6), "tensorrt")[1] is None
    assert layer(nn.Sequential(nn.Linear(6, 4)), torch.randn(8, 6), "virtual")[1] is None


def test_a_layer_without_bias_has_none() -> None:
    assert layer(nn.Sequential(nn.Linear(6, 4, bias=False)), torch.randn(8, 6))[1] is None


def dead_channel() -> nn.Sequential:
    """Channel 1: weights next to nothing, a bias of ordinary size. What folding a dead batch norm leaves."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    with torch.no_grad():
        model[0].weight[1] = 1e-14
        model[0].bias[1] = 3.0
    return model


def test_a_channel_whose_bias_does_not_fit_gets_a_coarser_grid() -> None:
    model, x = dead_channel(), torch.randn(2, 3, 6, 6)
    qmodel, rounding = layer(model, x)
    assert rounding is not None
    codes = model[0].bias.detach() / rounding.scale()
    assert float(codes.abs().max()) <= LARGEST_BIAS * 1.001 < INT32[1]
    with torch.no_grad():
        error = (qmodel(x) - model(x)).abs().amax((0, 2, 3))
    assert float(error[1]) < 1e-2
    assert float(error.max()) < 0.05


def test_room_is_made_for_one_scale_per_tensor_too() -> None:
    model = nn.Sequential(nn.Linear(6, 4))
    with torch.no_grad():
        model[0].weight.mul_(1e-14)
    config = qconfig({"W.QSCHEME": "per-tensor-symmetric"}, backend="openvino")
    qmodel = calibrated(model, [torch.randn(8, 6)], config)
    (rounding,) = (module for module in qmodel.modules() if isinstance(module, BiasRounding))
    assert site(qmodel, "0.weight").scale.numel() == 1
    assert float((model[0].bias.detach() / rounding.scale()).abs().max()) <= LARGEST_BIAS * 1.001


def test_scales_with_room_stay_as_they_are() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3)), torch.randn(2, 3, 6, 6)
    plain = site(calibrated(model, [x], qconfig(backend="tensorrt")), "0.weight").scale
    narrow = site(layer(model, x)[0], "0.weight").scale  # [-127, 127]
    assert bool(((narrow / plain) >= 0.999).all()) and bool(((narrow / plain) < 1.01).all())
