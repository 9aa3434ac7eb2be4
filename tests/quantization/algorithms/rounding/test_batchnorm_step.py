"""`ALGORITHMS: [batchnorm_tuning]`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsebit
from sparsebit.config.schema import QuantConfig
from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.quantization import QuantModel, apply_algorithms, parse_qconfig, tune_batchnorms
from tests.parameters import first_fast
from tests.quantization.tiny import Residual, TwoLayers, calibrated, qconfig

TUNING = {"ALGORITHMS": ["batchnorm_tuning"]}


@pytest.fixture
def batches() -> list[Tensor]:
    return list(torch.randn(3, 8, 3, 8, 8))


def norms(qmodel: nn.Module) -> list[nn.Module]:
    return [module for module in qmodel.modules() if issubclass(type(module), nn.BatchNorm2d)]


def trained() -> Residual:
    """With the statistics that its norms see on other data than the tests'."""
    model = Residual().train()
    with torch.no_grad():
        for _ in range(50):
            model(2 * torch.randn(8, 3, 8, 8) + 1)
    return model.eval()


class TestConfig:
    @pytest.mark.sample(2)
    @pytest.mark.parametrize("backend", ["virtual", "onnxruntime", "openvino", "tensorrt"])
    def test_norms_are_kept_until_then(self, batches: list[Tensor], backend: str) -> None:
        config = qconfig(TUNING, backend=backend)
        assert norms(QuantModel(Residual().eval(), config))
        assert norms(QuantModel(Residual().eval(), qconfig({**TUNING, "SCHEDULE.FUSE_BN": True}, backend=backend)))
        qmodel = sparsebit.quantize(Residual().eval(), batches, config)
        assert not norms(qmodel) and qmodel.applied_algorithms == ("batchnorm_tuning",)
        assert qmodel.is_quantized("weight") and qmodel.is_quantized("activation") and not qmodel.training

    @pytest.mark.parametrize("steps", [["bn_tuning"], [{"batchnorm_tuning": {"METHOD": "replace"}}]], ids=str)
    def test_other_spellings_and_changed_configs(self, steps: list[Any]) -> None:
        config = qconfig().replace("ALGORITHMS", steps)
        assert config.without_batchnorm_tuning == "take batchnorm_tuning out of ALGORITHMS"
        assert norms(QuantModel(Residual().eval(), config))
        assert parse_qconfig(config.to_dict()) == config

    def test_weights_have_a_scale_per_channel(self) -> None:
        told = "QSCHEME=per-tensor-symmetric: .*per-channel-symmetric, or take batchnorm_tuning out of ALGORITHMS"
        with pytest.raises(ConfigError, match=told):
            qconfig({**TUNING, "W.QSCHEME": "per-tensor-symmetric"})

    @pytest.mark.parametrize(
        "steps", [["batchnorm_tuning", "gptq"], ["bn_tuning", "batchnorm_tuning"]], ids=["gptq behind it", "twice"]
    )
    def test_it_is_the_last(self, steps: list[str]) -> None:
        with pytest.raises(ConfigError, match=r"ALGORITHMS: batchnorm_tuning folds .* as the last"):
            qconfig({"ALGORITHMS": steps})
        with pytest.raises(ConfigError, match="as the last"):
            QuantConfig.from_dict({"ALGORITHMS": steps})

    def test_a_placement_is_not_measured_with_norms(self, batches: list[Tensor]) -> None:
        with pytest.raises(ConfigError, match=r"placement='measured'.*take batchnorm_tuning out of ALGORITHMS"):
            sparsebit.quantize(Residual(), batches, qconfig(TUNING, backend="onnxruntime"), placement="measured")


class TestStatistics:
    @torch.no_grad()
    def test_the_difference_is_what_quantization_shifts(self, batches: list[Tensor]) -> None:
        """One layer and its norm: what comes out has the mean and the variance that the float model gives it."""
        model = nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6))
        for _ in range(50):
            model(2 * torch.randn(8, 3, 8, 8) + 1)
        model.eval()
        config = qconfig(TUNING, bits=2)
        rounded = sparsebit.quantize(model, batches, config.replace("ALGORITHMS", []))
        tuned = sparsebit.quantize(model, batches, config)
        x = torch.cat(batches)
        expected = model(x)
        for statistic in (torch.mean, torch.std):
            wanted = statistic(expected, (0, 2, 3))
            errors = [(statistic(qmodel(x), (0, 2, 3)) - wanted).abs().max() for qmodel in (tuned, rounded)]
            assert errors[0] < 0.02 and errors[0] < errors[1] / 3

    @torch.no_grad()
    def test_other_data_than_that_of_the_training_changes_nothing_by_itself(self, batches: list[Tensor]) -> None:
        model = trained()
        qmodel = sparsebit.quantize(model, batches, qconfig(TUNING, bits=8))
        torch.testing.assert_close(qmodel(batches[0]), model(batches[0]), atol=0.1, rtol=0)
        replaced = qconfig({"ALGORITHMS": [{"batchnorm_tuning": {"METHOD": "replace"}}]}, bits=8)
        other = sparsebit.quantize(model, batches, replaced)
        assert (other(batches[0]) - model(batches[0])).abs().max() > 0.1

    def test_replace_is_the_context_manager(self, batches: list[Tensor]) -> None:
        model = trained()
        config = qconfig({"SCHEDULE.BN_TUNING": True}, bits=4)
        one, other = (calibrated(copy.deepcopy(model), batches, config) for _ in range(2))
        moved = tune_batchnorms(one, batches, method="replace")
        with torch.no_grad(), other.batchnorm_tuning():
            for x in batches:
                other(x)
        other.set_quant(True, True)
        assert torch.equal(one(batches[0]), other(batches[0]))
        assert moved.keys() == {"stem.bn", "bn"} and all(shift > 0 for shift in moved.values())

    def test_dropout_stays_off_and_two_runs_are_equal(self, batches: list[Tensor]) -> None:
        model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Dropout(0.5), nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6)).eval()
        one, other = (sparsebit.quantize(model, batches, qconfig(TUNING, bits=4)) for _ in range(2))
        states = one.state_dict(), other.state_dict()
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])

    def test_after_gptq_the_difference_is_to_the_float_weights(self, batches: list[Tensor]) -> None:
        model = trained()
        config = qconfig({"ALGORITHMS": ["gptq", "batchnorm_tuning"]}, bits=2)
        errors = [
            (sparsebit.quantize(model, batches, config.replace("ALGORITHMS", steps))(batches[0]) - model(batches[0]))
            .square()
            .mean()
            for steps in ([], ["gptq", "batchnorm_tuning"])
        ]
        assert errors[1] < errors[0]


class TestFaults:
    def test_a_model_without_norms(self) -> None:
        with pytest.raises(CalibrationError, match=r"no batch norm .* take batchnorm_tuning out of ALGORITHMS"):
            sparsebit.quantize(TwoLayers(), [torch.randn(8, 6)], qconfig(TUNING))

    def test_norms_that_were_folded(self, batches: list[Tensor]) -> None:
        qmodel = sparsebit.quantize(Residual().eval(), batches, qconfig({"SCHEDULE.FUSE_BN": True}))
        with pytest.raises(CalibrationError, match=r"set SCHEDULE.BN_TUNING: true"):
            tune_batchnorms(qmodel, batches)

    def test_one_value_per_channel(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
        with pytest.raises(CalibrationError, match="give batches of several samples"):
            sparsebit.quantize(model, [torch.randn(1, 3, 3, 3)] * 8, qconfig(TUNING))

    @pytest.mark.parametrize("method", ["difference", "replace"])
    def test_after_an_error_all_is_as_it_was(self, batches: list[Tensor], method: Any) -> None:
        qmodel = calibrated(trained(), batches, qconfig({"SCHEDULE.BN_TUNING": True}))
        before = {key: value.clone() for key, value in qmodel.state_dict().items()}
        with pytest.raises(RuntimeError):
            tune_batchnorms(qmodel, [batches[0], torch.randn(2, 5, 8, 8)], method=method)
        now = qmodel.state_dict()
        assert all(torch.equal(now[key], value) for key, value in before.items())
        assert qmodel.is_quantized("weight") and not any(module.training for module in qmodel.modules())

    def test_what_comes_behind_it_is_told(self, batches: list[Tensor], caplog: pytest.LogCaptureFixture) -> None:
        qmodel = sparsebit.quantize(Residual().eval(), batches, qconfig(TUNING))
        qmodel.accuracy_gains(batches, "agreement", num_layers=1)
        assert "or tuned its batch norms" in caplog.text


def test_saved_and_loaded(batches: list[Tensor], tmp_path: Path) -> None:
    qmodel = sparsebit.quantize(trained(), batches, qconfig(TUNING, bits=4))
    again = QuantModel.load(qmodel.save(tmp_path / "saved"), Residual())
    assert torch.equal(again(batches[0]), qmodel(batches[0])) and not norms(again)
    assert again.applied_algorithms == ("batchnorm_tuning",)


@pytest.mark.parametrize("backend", first_fast(["onnxruntime", "openvino"]))
@pytest.mark.exact_sums
def test_exported_through_the_check(batches: list[Tensor], tmp_path: Path, backend: str) -> None:
    pytest.importorskip(backend)
    qmodel = sparsebit.quantize(trained(), batches, qconfig(TUNING, backend=backend))
    parity = qmodel.export_onnx(batches[0][:1], tmp_path / "tuned.onnx", check=[x[:1] for x in batches])
    assert parity is not None


def test_apply_algorithms(batches: list[Tensor]) -> None:
    qmodel = calibrated(trained(), batches, qconfig(TUNING))
    ((name, moved),) = apply_algorithms(qmodel, batches)
    assert name == "batchnorm_tuning" and moved.keys() == {"stem.bn", "bn"}
