from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.errors import CalibrationError
from sparsebit.quantization import QuantModel
from tests.quantization.tiny import Residual, TwoLayers, calibrated, qconfig, simulated, site


@pytest.fixture
def qmodel() -> QuantModel:
    return calibrated(TwoLayers(), torch.randn(2, 8, 6), qconfig(bits=3))


def layer_by_hand(qmodel: QuantModel, name: str, x: Tensor) -> Tensor:
    op = getattr(qmodel.model, name).op
    weight = simulated(site(qmodel, f"{name}.weight"), op.weight)
    return F.linear(simulated(site(qmodel, f"{name}.input"), x), weight, op.bias)


@torch.no_grad()
def test_async_quantizes_each_layer_alone(qmodel: QuantModel) -> None:
    x = torch.randn(8, 6)
    first = qmodel.model.first.op(x)
    hidden = torch.tanh(first)
    expected = {
        "first": F.mse_loss(layer_by_hand(qmodel, "first", x), first),
        "second": F.mse_loss(layer_by_hand(qmodel, "second", hidden), qmodel.model.second.op(hidden)),
    }
    assert qmodel.get_quantization_error(x) == pytest.approx({name: float(e) for name, e in expected.items()})


@torch.no_grad()
def test_sync_quantizes_all_layers(qmodel: QuantModel) -> None:
    x = torch.randn(8, 6)
    quantized = layer_by_hand(qmodel, "first", x)
    first = qmodel.model.first.op(x)
    second = qmodel.model.second.op(torch.tanh(first))
    expected = {
        "first": F.mse_loss(quantized, first),
        "second": F.mse_loss(layer_by_hand(qmodel, "second", torch.tanh(quantized)), second),
    }
    actual = qmodel.get_quantization_error(x, is_async=False)
    assert actual == pytest.approx({name: float(e) for name, e in expected.items()})


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_any_checker(qmodel: QuantModel, is_async: bool) -> None:
    shapes = []

    def largest(quantized: Tensor, original: Tensor) -> Tensor:
        shapes.append(tuple(original.shape))
        return (quantized - original).abs().max()

    errors = qmodel.get_quantization_error(torch.randn(8, 6), largest, is_async=is_async)
    assert shapes == [(8, 8), (8, 3)]
    assert all(0 < error < 10 for error in errors.values())


@pytest.mark.parametrize("wrap", [
    lambda x: x, lambda x: [x], lambda x: (part for part in [x]), lambda x: {"x": x}, lambda x: [{"x": x}],
    lambda x: (x, torch.zeros(8)), lambda x: [(x, torch.zeros(8))],
    lambda x: torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, torch.zeros(8)), batch_size=8),
], ids=["tensor", "list", "generator", "dict", "dicts", "tuple", "tuples", "loader"])  # fmt: skip
def test_one_batch_or_many_in_any_form(qmodel: QuantModel, wrap: object) -> None:
    x = torch.randn(8, 6)
    assert qmodel.get_quantization_error(wrap(x)) == qmodel.get_quantization_error(x)  # type: ignore[operator]


def test_batches_are_averaged(qmodel: QuantModel) -> None:
    x, y = torch.randn(2, 8, 6)
    alone = [qmodel.get_quantization_error(batch)["second"] for batch in (x, y)]
    assert qmodel.get_quantization_error([x, y])["second"] == pytest.approx(sum(alone) / 2)


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_switches_and_mode_are_as_before(qmodel: QuantModel, is_async: bool) -> None:
    qmodel.train()
    qmodel.set_quant(a_quant=True)
    before = {quantizer.name: quantizer.use_quant for quantizer in qmodel.quantizers()}
    qmodel.get_quantization_error(torch.randn(8, 6), is_async=is_async)
    assert {quantizer.name: quantizer.use_quant for quantizer in qmodel.quantizers()} == before
    assert qmodel.training
    with pytest.raises(ZeroDivisionError):
        qmodel.get_quantization_error(torch.randn(8, 6), lambda a, b: 1 / 0, is_async=is_async)
    assert {quantizer.name: quantizer.use_quant for quantizer in qmodel.quantizers()} == before
    qmodel(torch.randn(8, 6))  # no hook is left behind


def test_quantizers_that_stand_alone_are_listed_by_site() -> None:
    config = qconfig({"A.QADD.ENABLE_QUANT": True})
    qmodel = calibrated(Residual().eval(), [torch.randn(2, 3, 8, 8)], config)
    errors = qmodel.get_quantization_error(torch.randn(2, 3, 8, 8), is_async=False)
    assert {"stem.conv", "stem.relu.shared", "conv", "add.input.0", "fc"} <= errors.keys()


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_a_layer_called_twice_is_averaged(is_async: bool) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.fc(x))

    qmodel = calibrated(Twice(), [torch.randn(4, 6)], qconfig(bits=4))
    assert qmodel.get_quantization_error(torch.randn(4, 6), is_async=is_async)["fc"] > 0


@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
def test_profile_is_the_error_of_every_layer_and_site(qmodel: QuantModel, sync: bool) -> None:
    batches = [torch.randn(8, 6), torch.randn(8, 6)]
    found = qmodel.profile(batches, sync=sync)
    errors = qmodel.get_quantization_error(batches, is_async=not sync)
    assert {layer.layer: layer.error for layer in found.layers} == pytest.approx(errors)
    assert [layer.sqnr_db for layer in found.layers] == sorted(layer.sqnr_db for layer in found.layers)
    sites = {error.site: error for error in found.sites}
    assert sites.keys() == {"first.input", "first.weight", "second.input", "second.weight"}
    assert found.sync is sync and found.num_batches == 2


@torch.no_grad()
@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
def test_sites_are_measured_on_float_values(qmodel: QuantModel, sync: bool) -> None:
    x = torch.randn(8, 6)
    sites = {error.site: error for error in qmodel.profile(x, sync=sync).sites}
    op = qmodel.model.first.op
    seen = {"first.input": x, "first.weight": op.weight, "second.input": torch.tanh(op(x))}
    for name, values in seen.items():
        error = sites[name]
        assert error.mse == pytest.approx(float(F.mse_loss(simulated(site(qmodel, name), values), values)), rel=1e-4)
        assert (error.low, error.high) == pytest.approx((float(values.min()), float(values.max())), rel=1e-5)
        assert error.histogram is not None and sum(error.histogram.counts) == values.numel()
    assert sites["first.weight"].target == "weight" and sites["first.input"].target == "activation"


def test_histograms_may_be_left_out(qmodel: QuantModel) -> None:
    assert all(error.histogram is None for error in qmodel.profile(torch.randn(8, 6), histograms=False).sites)


def test_profile_leaves_the_model_as_it_was(qmodel: QuantModel) -> None:
    x = torch.randn(8, 6)
    before = qmodel(x)
    with pytest.raises(RuntimeError):
        qmodel.profile(torch.randn(8, 7))
    qmodel.profile(x)
    assert torch.equal(qmodel(x), before)
    assert not any(module._forward_pre_hooks for module in qmodel.modules())


def test_weights_without_a_layer_are_sites_too() -> None:
    qmodel = calibrated(nn.LSTM(4, 4, batch_first=True).eval(), [torch.randn(2, 3, 4)])
    targets = {error.site: error.target for error in qmodel.profile(torch.randn(2, 3, 4)).sites}
    assert targets and set(targets.values()) == {"weight"}


def test_a_quantizer_that_transforms_first() -> None:
    config = qconfig({"W.QUANTIZER.TYPE": "dorefa", "A.QUANTIZER.TYPE": "uniform"}, bits=4)
    qmodel = calibrated(TwoLayers(), torch.randn(2, 8, 6), config)
    weight = next(error for error in qmodel.profile(torch.randn(8, 6)).sites if error.site == "first.weight")
    assert weight.high <= 1 and weight.clipped == 0


def test_profile_needs_numbers() -> None:
    with pytest.raises(CalibrationError, match=r"profile\(\) needs a calibrated model"):
        QuantModel(TwoLayers(), qconfig()).profile(torch.randn(8, 6))
