from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sparsebit.errors import CalibrationError
from sparsebit.quantization import QuantModel
from tests.quantization.tiny import Residual, calibrated, qconfig, run, simulated, site
from tests.quantization.tiny_training import Net, data, ready, train

CONFIG = {"SCHEDULE.BN_TUNING": True, "SCHEDULE.FUSE_BN": True}
SHAPE = (4, 3, 8, 8)


def norms(qmodel: nn.Module) -> list[nn.BatchNorm2d]:
    return [module for module in qmodel.modules() if issubclass(type(module), nn.BatchNorm2d)]


def tuned(model: nn.Module, batches: Tensor, bits: int = 4) -> QuantModel:
    qmodel = calibrated(model, batches, qconfig(CONFIG, bits=bits))
    with torch.no_grad(), qmodel.batchnorm_tuning():
        run(qmodel, batches)
    return qmodel


def test_inside_quantization_is_on_and_statistics_start_from_nothing() -> None:
    qmodel = calibrated(Residual().eval(), [torch.randn(SHAPE)], qconfig(CONFIG))
    qmodel.set_quant()
    with torch.no_grad(), qmodel.batchnorm_tuning():
        assert qmodel.training and qmodel.is_quantized("weight") and qmodel.is_quantized("activation")
        assert all(int(norm.num_batches_tracked) == 0 and not norm.running_mean.any() for norm in norms(qmodel))
        qmodel(torch.randn(SHAPE))


def test_statistics_are_the_plain_average_over_the_batches() -> None:
    model, batches = Residual().eval(), torch.randn(3, *SHAPE)
    qmodel = calibrated(model, batches, qconfig(CONFIG, bits=4))
    layer = qmodel.model.stem.conv
    outputs = [layer(batch) for batch in batches]
    with torch.no_grad(), qmodel.batchnorm_tuning():
        run(qmodel, batches)
        norm = qmodel.model.stem.bn
        expected = torch.stack([output.mean((0, 2, 3)) for output in outputs]).mean(0)
        torch.testing.assert_close(norm.running_mean, expected)


def test_on_leaving_norms_are_folded_and_everything_is_off() -> None:
    model, batches = Residual().eval(), torch.randn(3, *SHAPE)
    qmodel = calibrated(model, batches, qconfig(CONFIG))
    with torch.no_grad(), qmodel.batchnorm_tuning():
        run(qmodel, batches)
        reference = copy.deepcopy(qmodel)
    assert not qmodel.training and not qmodel.is_quantized("weight") and not qmodel.is_quantized("activation")
    assert norms(qmodel) == [] and len(norms(reference)) == 2
    reference.eval().set_quant()
    x = torch.randn(SHAPE)
    torch.testing.assert_close(qmodel(x), reference(x), rtol=1e-4, atol=1e-5)


def test_folded_weights_are_calibrated_anew() -> None:
    qmodel = tuned(Residual().eval(), torch.randn(3, *SHAPE))
    quantizer, weight = site(qmodel, "stem.conv.weight"), qmodel.model.stem.conv.op.weight
    expected = weight.detach().abs().amax((1, 2, 3))
    torch.testing.assert_close(torch.stack(quantizer.dequantized_range()).abs().amax(0), expected, rtol=0.2, atol=0)
    assert (weight - simulated(quantizer, weight)).abs().amax() <= quantizer.scale.max() / 2 + 1e-6


def test_the_statistics_fit_the_quantized_network() -> None:
    """Behind the tuned norm every channel has the mean and the spread that the norm is to give, at few bits too."""
    model, batches = Residual().eval(), torch.randn(4, *SHAPE)
    x = torch.cat(list(batches))

    def misfit(qmodel: QuantModel) -> float:
        qmodel.set_quant(w_quant=True, a_quant=True)
        with torch.no_grad():
            output = (
                qmodel.model.stem.conv(x) if norms(qmodel) == [] else qmodel.model.stem.bn(qmodel.model.stem.conv(x))
            )
        return float((output.mean((0, 2, 3)) - model.stem.bn.bias).abs().max().detach())

    assert misfit(tuned(model, batches, bits=2)) < 0.3 * misfit(calibrated(model, batches, qconfig(CONFIG, bits=2)))


def test_momentum_of_the_user_is_kept_for_norms_that_stay() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn, self.conv = nn.BatchNorm2d(3, momentum=0.3), nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(self.bn(x))

    qmodel = tuned(Alone().eval(), torch.randn(2, *SHAPE))
    (norm,) = norms(qmodel)
    assert norm.momentum == 0.3 and int(norm.num_batches_tracked) == 2


@pytest.mark.parametrize("shape", [(8, 6), (8, 6, 6)], ids=["matrix", "sequence"])
def test_a_linear_is_folded_where_the_channels_are_its_own(shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).eval()
    batches = torch.randn(3, *shape)
    qmodel = calibrated(model, batches, qconfig(CONFIG))
    with torch.no_grad(), qmodel.batchnorm_tuning():
        run(qmodel, batches)
        reference = copy.deepcopy(qmodel)
    reference.eval().set_quant()
    torch.testing.assert_close(qmodel(batches[0]), reference(batches[0]), rtol=1e-4, atol=1e-5)
    assert any(isinstance(module, nn.BatchNorm1d) for module in qmodel.modules()) == (len(shape) == 3)


def test_wrapped_norms_are_folded_too() -> None:
    config = qconfig({**CONFIG, "SCHEDULE.DISABLE_UNNECESSARY_QUANT": False})
    qmodel = calibrated(Residual().eval(), [torch.randn(SHAPE)], config)
    with torch.no_grad(), qmodel.batchnorm_tuning():
        qmodel(torch.randn(SHAPE))
    assert norms(qmodel) == []


def test_a_tuned_model_is_kept_and_copied(tmp_path: Path) -> None:
    qmodel, x = tuned(Residual().eval(), torch.randn(2, *SHAPE)), torch.randn(SHAPE)
    qmodel.set_quant(w_quant=True, a_quant=True)
    for other in (
        QuantModel.load(qmodel.save(tmp_path), Residual()),
        copy.deepcopy(qmodel),
        pickle.loads(pickle.dumps(qmodel)),
    ):
        assert torch.equal(other(x), qmodel(x)) and norms(other) == []


class TestFaults:
    def test_before_calibration(self) -> None:
        qmodel = QuantModel(Residual(), qconfig(CONFIG))
        mean = norms(qmodel)[0].running_mean.clone()
        with pytest.raises(CalibrationError, match="has no scale yet"), qmodel.batchnorm_tuning():
            pass
        assert torch.equal(norms(qmodel)[0].running_mean, mean)

    def test_without_norms(self) -> None:
        qmodel = calibrated(Residual(), [torch.randn(SHAPE)], qconfig({"SCHEDULE.FUSE_BN": True}))
        with pytest.raises(CalibrationError, match=r"no batch norm .* is left .* set SCHEDULE.BN_TUNING: true"):  # noqa: SIM117
            with qmodel.batchnorm_tuning():
                pass

    def test_without_a_forward(self) -> None:
        qmodel = calibrated(Residual().eval(), [torch.randn(SHAPE)], qconfig(CONFIG))
        mean = norms(qmodel)[0].running_mean.clone()
        with pytest.raises(CalibrationError, match="no forward was run inside"), qmodel.batchnorm_tuning():
            pass
        assert torch.equal(norms(qmodel)[0].running_mean, mean) and len(norms(qmodel)) == 2

    def test_an_error_inside_gives_the_statistics_back(self) -> None:
        qmodel, x = calibrated(Residual().eval(), [torch.randn(SHAPE)], qconfig(CONFIG)), torch.randn(SHAPE)
        qmodel.set_quant()
        expected = qmodel(x)
        with pytest.raises(RuntimeError, match="channels"), torch.no_grad(), qmodel.batchnorm_tuning():
            run(qmodel, [x, x[:, :2]])
        assert not qmodel.training and torch.equal(qmodel(x), expected)
        assert all(norm.momentum == 0.1 for norm in norms(qmodel))


class TestTrainedScales:
    """The integers of a trained weight are the same after the folding, mirrored where gamma is negative."""

    @staticmethod
    def codes(qmodel: QuantModel, layer: str) -> Tensor:
        quantizer, weight = site(qmodel, f"{layer}.weight"), qmodel.model.get_submodule(layer).op.weight
        with torch.no_grad():
            scale, zero_point = quantizer.qparams()
            shape = (-1, *([1] * (weight.ndim - 1)))
            centred = zero_point.round().reshape(shape) if zero_point.ndim else zero_point.round()
            step = scale.reshape(shape) if scale.ndim else scale
            values = (quantizer.transform(weight) / step).round() + centred
            return values.clamp(quantizer.spec.qmin, quantizer.spec.qmax) - centred

    @pytest.mark.parametrize("scheme", ["per-channel-symmetric", "per-channel-affine"])
    @pytest.mark.parametrize("way", ["lsq", "lsq+", "dorefa", "fixed"])
    def test_codes_stay(self, way: str, scheme: str) -> None:
        qmodel = train(ready(way, {"W.QSCHEME": scheme}))
        before = {layer: self.codes(qmodel, layer) for layer in ("conv1", "conv2")}
        signs = {
            layer: qmodel.model.get_submodule(norm).weight.sign()
            for layer, norm in (("conv1", "bn1"), ("conv2", "bn2"))
        }
        assert (signs["conv1"] < 0).any()
        with torch.no_grad(), qmodel.batchnorm_tuning():
            qmodel(data()[0])
        for layer, codes in before.items():
            spec = site(qmodel, f"{layer}.weight").spec
            expected = codes * signs[layer].reshape(-1, 1, 1, 1)
            if spec.symmetric:
                expected = expected.clamp(spec.qmin, spec.qmax)
            assert torch.equal(self.codes(qmodel, layer), expected)

    def test_what_the_model_computes_stays(self) -> None:
        qmodel, x = train(ready("lsq", bits=8), lr=1e-3), data()[0]
        with torch.no_grad(), qmodel.batchnorm_tuning():
            qmodel(x)
            reference = copy.deepcopy(qmodel).eval()
        qmodel.set_quant(w_quant=True, a_quant=True)
        torch.testing.assert_close(qmodel(x), reference(x), rtol=1e-3, atol=1e-4)

    def test_folded_as_they_are(self) -> None:
        qmodel, x = train(ready("lsq", bits=8), lr=1e-3).eval(), data()[0]
        expected, before = qmodel(x), {layer: self.codes(qmodel, layer).abs() for layer in ("conv1", "conv2")}
        qmodel.fold_batchnorm()
        assert norms(qmodel) == [] and qmodel.is_quantized("weight") and qmodel.is_quantized("activation")
        torch.testing.assert_close(qmodel(x), expected, rtol=1e-3, atol=1e-4)
        for layer, codes in before.items():
            assert (self.codes(qmodel, layer).abs() - codes).abs().max() <= 1  # mirrored, -128 becomes 127

    def test_not_before_calibration(self) -> None:
        qmodel = QuantModel(Residual(), qconfig(CONFIG))
        with pytest.raises(CalibrationError, match=r"fold_batchnorm\(\) needs a calibrated model"):
            qmodel.fold_batchnorm()

    def test_weights_in_groups(self) -> None:
        model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).eval()
        nn.init.uniform_(model[1].weight, -2, 2)
        changes = {"W.QSCHEME": "per-group-symmetric", "W.QUANTIZER.GROUP_SIZE": 4, "W.QUANTIZER.TYPE": "lsq"}
        batches = torch.randn(2, 16, 8)
        qmodel = calibrated(model, batches, qconfig(changes, bits=4))
        site(qmodel, "0.weight").scale.data.mul_(1.7)  # as if trained
        with torch.no_grad(), qmodel.batchnorm_tuning():
            run(qmodel, batches)
            qmodel.eval()
            expected = qmodel(batches[0])
        qmodel.set_quant(w_quant=True, a_quant=True)
        # A negative factor turns code -8 into 7.
        assert (qmodel(batches[0]) - expected).abs().mean() < 0.05

    def test_one_scale_for_all_channels_is_calibrated_anew_and_said(self, caplog: pytest.LogCaptureFixture) -> None:
        qmodel = train(ready("lsq", {"W.QSCHEME": "per-tensor-symmetric"}))
        with torch.no_grad(), qmodel.batchnorm_tuning():
            qmodel(data()[0])
        assert "conv1.weight: its learned scale cannot absorb a factor per channel" in caplog.text
        quantizer, weight = site(qmodel, "conv1.weight"), qmodel.model.conv1.op.weight
        torch.testing.assert_close(quantizer.scale.squeeze() * 8, weight.abs().max(), rtol=0.2, atol=0)

    def test_loading_says_nothing_of_it(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        qmodel = train(ready("lsq"))
        with torch.no_grad(), qmodel.batchnorm_tuning():
            qmodel(data()[0])
        loaded = QuantModel.load(qmodel.save(tmp_path), Net())
        assert "anew" not in caplog.text
        assert torch.equal(site(loaded, "conv1.weight").scale, site(qmodel, "conv1.weight").scale)

    def test_a_channel_of_factor_zero(self) -> None:
        qmodel = ready("lsq")
        with torch.no_grad():
            qmodel.model.bn1.weight[2] = 0
        with torch.no_grad(), qmodel.batchnorm_tuning():
            qmodel(data()[0])
        qmodel.set_quant(w_quant=True, a_quant=True)
        assert qmodel(data()[0]).isfinite().all() and bool(site(qmodel, "conv1.weight").scale[2] > 1e-6)
