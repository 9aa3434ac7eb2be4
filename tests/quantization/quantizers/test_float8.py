from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from sparsebit.errors import BackendError, ConfigError, SpecError
from sparsebit.numerics.spec import PerChannel, PerTensor, TensorSpec
from sparsebit.quantization import QuantModel
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.quantization.quantizers.registration import build_quantizer
from tests.quantization.tiny import Residual, calibrated, qconfig, simulated, site

WEIGHTS_ONLY = {"W.QUANTIZER.TYPE": "fp8", "A.QUANTIZER": {"DISABLE": True}}
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def float8(weight: torch.Tensor, granularity: PerTensor | PerChannel) -> Quantizer:
    quantizer = build_quantizer("fp8", TensorSpec(8, True, granularity, narrow=True), "weight", name="w")
    quantizer.update_observer(weight)
    quantizer.calc_qparams()
    quantizer.enable_quant()
    return quantizer


@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(0)], ids=str)
def test_weights_become_8_bit_floats_times_a_scale(granularity: PerTensor | PerChannel) -> None:
    weight = torch.randn(3, 40) * torch.tensor([[0.01], [1.0], [30.0]])
    quantizer = float8(weight, granularity)
    largest = weight.abs().max() if granularity.axis is None else weight.abs().amax(1)
    assert torch.allclose(quantizer.scale * 448, largest)
    output = quantizer(weight)
    assert torch.equal(output, simulated(quantizer, weight))
    codes = output / (quantizer.scale if granularity.axis is None else quantizer.scale[:, None])
    assert torch.allclose(codes, codes.to(torch.float8_e4m3fn).float(), rtol=1e-6)
    assert quantizer.summary().startswith("float8e4m3fn scale=")
    low, high = quantizer.dequantized_range()
    assert torch.allclose(high, largest) and torch.equal(low, -high)


def test_other_bits_are_refused() -> None:
    with pytest.raises(SpecError, match=r"4 bits.*fp8 has 8 bits"):
        float8(torch.randn(2, 3), PerTensor()).set_bit(4)


def test_an_activation_is_refused() -> None:
    with pytest.raises(BackendError, match=r"fc.input: quantizer 'fp8' is for weight tensors, not for an activation"):
        build_quantizer("fp8", TensorSpec(8, True), "activation", name="fc.input")


class TestConfig:
    @pytest.mark.parametrize(
        ("changes", "told"),
        [
            (
                {"A.QUANTIZER.TYPE": "fp8"},
                r"^A.QUANTIZER.TYPE=fp8: not made for activations; allowed: .*; write A.QUANTIZER.TYPE: uniform$",
            ),
            ({"W.QUANTIZER.BIT": 4}, r"W.QUANTIZER.BIT=4: fp8 has 8 bits, .*; set 8$"),
            ({"W.QUANTIZER.BIT": 0}, r"W.QUANTIZER.BIT=0: no number has 0 bits; set 8, or W.QUANTIZER.DISABLE"),
            (
                {"W.QSCHEME": "per-channel-affine"},
                r"W.QSCHEME=per-channel-affine: .* no zero point; set per-tensor-symmetric or per-channel-symmetric$",
            ),
            ({"W.QSCHEME": "per-group-symmetric"}, r"W.QSCHEME=per-group-symmetric: .* one scale per tensor or per"),
            (
                {"W.OBSERVER.TYPE": "mse"},
                r"W.OBSERVER.TYPE=mse: it weighs even steps, .*; allowed: .*minmax, moving_average, percentile",
            ),
        ],
        ids=["activation", "bits", "no bits", "affine", "group", "observer"],
    )
    def test_refused(self, changes: dict[str, object], told: str) -> None:
        with pytest.raises(ConfigError, match=told):
            qconfig({"W.QUANTIZER.TYPE": "fp8", **changes})
        key, value = next(iter(changes.items()))
        settings = {"QUANTIZER.TYPE": "fp8", key[2:]: value}
        with pytest.raises(ConfigError, match=told.replace(": ", " at fc: ", 1)):
            qconfig({f"{key[0]}.SPECIFIC": [{"fc": [part for item in settings.items() for part in item]}]})

    @pytest.mark.parametrize("backend", ["onnxruntime", "openvino", "tensorrt"])
    def test_runtimes_want_float_activations_beside_it(self, backend: str) -> None:
        told = (
            f"W.QUANTIZER.TYPE=fp8 at fc: {backend} runs fp8 weights with float activations only; "
            "set A.QUANTIZER.DISABLE: true, or another TYPE, or BACKEND: virtual"
        )
        with pytest.raises(ConfigError, match=told):
            qconfig({"W.SPECIFIC": [{"fc": ["QUANTIZER.TYPE", "fp8"]}]}, backend=backend)
        assert qconfig(WEIGHTS_ONLY, backend=backend).W.QUANTIZER.TYPE == "fp8"

    def test_virtual_takes_it_beside_anything(self) -> None:
        qmodel = calibrated(nn.Sequential(nn.Linear(6, 3)), [X], qconfig({"W.QUANTIZER.TYPE": "FP8"}))
        assert "weight=float8e4m3fn" in repr(qmodel)


def test_onnxruntime_refuses_it_behind_a_quantized_output() -> None:
    """It would make an integer convolution of the layer, and then refuse its own work."""
    changes = {
        "W.SPECIFIC": [{"conv": ["QUANTIZER.TYPE", "fp8"]}],
        "A.SPECIFIC": [{"conv": ["QUANTIZER.DISABLE", True]}],
    }
    with pytest.raises(
        BackendError, match=r"W.QUANTIZER.TYPE=fp8 at conv: .* output of stem.conv, .* true at stem.conv too"
    ):
        QuantModel(Residual(), qconfig(changes, backend="onnxruntime"))
    QuantModel(Residual(), qconfig(changes, backend="openvino"))


def test_trains() -> None:
    torch.manual_seed(0)
    model, target = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(4, 2)
    qmodel = calibrated(model, [X], qconfig(WEIGHTS_ONLY)).train()
    optimizer = torch.optim.SGD(qmodel.parameters(), lr=0.1)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (qmodel(X) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]


def test_saved_and_loaded(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 3))
    qmodel = calibrated(model, [X], qconfig(WEIGHTS_ONLY))
    qmodel.save(tmp_path / "m")
    loaded = QuantModel.load(tmp_path / "m", nn.Sequential(nn.Linear(6, 3)))
    assert torch.equal(loaded(X), qmodel(X))
    assert site(loaded, "0.weight").spec.format == "float8"
