"""Another quantizer at one site of a built model, and scales that are given rather than calibrated."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from sparsebit.config.section import Section
from sparsebit.errors import BackendError, CalibrationError, ConfigError, SpecError
from sparsebit.numerics.spec import PerChannel, PerGroup, PerTensor, TensorSpec
from sparsebit.quantization import Plan, Quantizer, QuantModel, register_quantizer
from sparsebit.quantization.ops.integer_ops import IntegerAdd, IntegerLayer
from sparsebit.quantization.quantizers.lsq import LSQ
from sparsebit.registry import QUANTIZERS
from tests.quantization.tiny import Residual, calibrated, prepared, qconfig

X = torch.randn(4, 3, 16, 16)
BACKENDS = ["virtual", "onnxruntime", "openvino", "tensorrt"]


def residual(backend: str = "virtual", changes: dict[str, Any] | None = None) -> QuantModel:
    torch.manual_seed(0)
    return calibrated(Residual(), [X], qconfig(changes, backend=backend))


class Functional(nn.Module):
    """A layer as a function, and an addition of two quantized tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 3, 3, 3))
        self.bias = nn.Parameter(torch.randn(8))
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(F.conv2d(x, self.weight * 1, self.bias) + self.conv(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.fc = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        return self.fc(self.gru(x)[0])


class TestOriginal:
    def test_it_is_the_model_that_was_given(self) -> None:
        model = Residual()
        qmodel = QuantModel(model, qconfig(), example_inputs=X)
        assert qmodel.original is model
        assert qmodel.example_inputs is not None and qmodel.example_inputs[0][0].is_meta
        assert QuantModel(model, qconfig()).example_inputs is None
        assert "original" not in dict(qmodel.named_children())


class TestSites:
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_each_site_of_the_plan_has_its_quantizer(self, backend: str) -> None:
        qmodel = residual(backend)
        assert list(qmodel.sites) == list(qmodel.plan)
        for name, quantizer in qmodel.sites.items():
            assert quantizer.name == name and quantizer.spec == qmodel.plan[name].spec
            assert (quantizer.target == "weight") == (qmodel.plan[name].role == "weight")

    def test_parameters_that_no_op_owns_are_sites_too(self) -> None:
        x = torch.randn(2, 5, 4)
        qmodel = calibrated(Recurrent().eval(), [x])
        assert (
            list(qmodel.sites) == list(qmodel.plan) == ["fc.input", "fc.weight", "gru.weight_ih_l0", "gru.weight_hh_l0"]
        )
        before = qmodel(x)
        new = qmodel.replace_quantizer("gru.weight_hh_l0", {"bits": 3})
        assert new.scale.numel() == 24 and not torch.equal(qmodel(x), before)

    def test_an_unknown_name_is_answered_with_near_ones(self) -> None:
        with pytest.raises(ConfigError, match=r"no site 'stem.conv.weigth'; near names: .*stem.conv.weight"):
            residual().store_qparams("stem.conv.weigth", 0.1)


class TestReplaceQuantizer:
    def test_fields_of_the_site(self) -> None:
        qmodel, expected = residual(), residual(changes={"W.SPECIFIC": [{"fc": ["QUANTIZER.BIT", 4]}]})
        new = qmodel.replace_quantizer("fc.weight", {"bits": 4})
        assert new is qmodel.sites["fc.weight"] and new.is_calibrated and new.is_enable
        assert qmodel.plan["fc.weight"].spec.dtype_name == new.spec.dtype_name == "int4"
        assert torch.equal(qmodel(X), expected(X))

    def test_before_calibration(self) -> None:
        qmodel = QuantModel(Residual(), qconfig())
        qmodel.replace_quantizer("fc.input", {"bits": 4, "observer": "mse"})
        assert qmodel.sites["fc.input"].observer_name == "mse" and not qmodel.sites["fc.input"].is_calibrated
        qmodel.prepare_calibration()
        qmodel(X)
        qmodel.calc_qparams()
        qmodel.set_quant(w_quant=True, a_quant=True)
        assert qmodel.sites["fc.input"].is_enable and qmodel.coverage.notes == ()

    def test_an_activation_keeps_its_range(self) -> None:
        qmodel = residual()
        low, high = qmodel.sites["fc.input"].dequantized_range()
        new = qmodel.replace_quantizer("fc.input", {"bits": 4})
        assert new.spec.bits == 4
        torch.testing.assert_close(torch.stack(new.dequantized_range()), torch.stack((low, high)), rtol=0.1, atol=0.1)

    def test_a_weight_is_calibrated_by_the_new_observer(self) -> None:
        qmodel = residual()
        new = qmodel.replace_quantizer("fc.weight", {"bits": 3, "observer": "mse"})
        built = prepared(qmodel.original, [X], plan=qmodel.plan)
        built.calc_qparams()
        assert torch.equal(new.scale, built.sites["fc.weight"].scale)

    @pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(0), PerGroup(1, 2)])
    def test_another_granularity_of_a_weight(self, granularity: Any) -> None:
        qmodel = residual()
        new = qmodel.replace_quantizer("fc.weight", {"granularity": granularity})
        assert new.spec.granularity == granularity
        assert new.scale.numel() == {"tensor": 1, "channel": 5, "group": 10}[granularity.kind]
        assert torch.isfinite(qmodel(X)).all()

    def test_an_activation_per_channel_cannot_take_a_range_per_tensor(self) -> None:
        qmodel = residual()
        before, plan = qmodel(X), qmodel.plan
        with pytest.raises(CalibrationError, match="its range is known per tensor, not per channel"):
            qmodel.replace_quantizer("fc.input", {"granularity": PerChannel(1)})
        assert qmodel.plan is plan and torch.equal(qmodel(X), before)

    def test_a_given_quantizer(self) -> None:
        qmodel = residual()
        old = qmodel.sites["fc.weight"]
        new = LSQ(old.spec, "weight", num_scales=old.scale.numel())
        assert qmodel.replace_quantizer("fc.weight", new) is new
        assert new.name == "fc.weight" and new.is_enable and not new.training
        torch.testing.assert_close(new.scale, old.scale)
        assert qmodel.plan["fc.weight"].quantizer == "lsq"
        assert any(parameter is new.scale for parameter in qmodel.parameters())
        qmodel.train()
        qmodel(X).sum().backward()
        assert new.scale.grad is not None and old not in list(qmodel.modules())

    def test_numbers_of_a_calibrated_quantizer_stay(self) -> None:
        qmodel = residual()
        new = type(qmodel.sites["fc.weight"])(TensorSpec(8, True), "weight")
        new.calc_qparams_with_minmax(torch.tensor(-1.0), torch.tensor(1.0))
        scale = float(new.scale)
        assert float(qmodel.replace_quantizer("fc.weight", new).scale) == scale
        assert qmodel.plan["fc.weight"].spec.granularity == PerTensor()

    @pytest.mark.parametrize("backend", ["onnxruntime", "openvino", "virtual"])
    @pytest.mark.parametrize("site", ["weight", "input", "output", "shared"])
    def test_it_is_the_model_that_the_changed_plan_builds(self, backend: str, site: str) -> None:
        """Also what holds quantizers of others: int32 biases, integer kernels, shared grids."""
        qmodel = residual(backend, {"A.QADD.ENABLE_QUANT": True})
        names = [name for name, planned in qmodel.plan.items() if planned.role == site]
        for name in names:
            qmodel.replace_quantizer(name, {"observer": "percentile"})
        built = prepared(qmodel.original, [X], plan=qmodel.plan)
        built.calc_qparams()
        for name, quantizer in qmodel.sites.items():
            scale, zero_point = quantizer.qparams()
            built.store_qparams(name, scale, zero_point)
        built.set_quant(w_quant=True, a_quant=True)
        assert str(built) == str(qmodel)
        assert torch.equal(built(X), qmodel(X))

    def test_integer_kernels_read_the_new_quantizers(self) -> None:
        qmodel = calibrated(Functional(), [X], qconfig(backend="onnxruntime"), example_inputs=X)
        before = qmodel(X)
        adds = [module for module in qmodel.modules() if isinstance(module, IntegerAdd)]
        for name in list(qmodel.sites):
            qmodel.replace_quantizer(name, {})
        live = set(map(id, qmodel.quantizers()))
        holders = [module for module in qmodel.modules() if hasattr(module, "sources")]
        assert holders and all(id(quantizer) in live for holder in holders for quantizer in holder.sources)
        assert len([module for module in qmodel.modules() if isinstance(module, IntegerAdd)]) == len(adds) == 1
        assert torch.equal(qmodel(X), before)

    def test_a_layer_that_no_integer_kernel_fits_any_more(self) -> None:
        qmodel = residual("onnxruntime")
        layer = next(m for m in qmodel.modules() if getattr(m, "weight_quantizer", None) is qmodel.sites["fc.weight"])
        assert layer.integer is not None
        qmodel.replace_quantizer("fc.weight", {"symmetric": False})
        assert layer.integer is None and layer.bias_rounding is None

    def test_saved_and_loaded(self, tmp_path: Path) -> None:
        qmodel = residual()
        qmodel.replace_quantizer("fc.weight", {"bits": 4, "quantizer": "lsq"})
        qmodel.replace_quantizer("fc.input", {"quantizer": "pact", "bits": 6})
        expected = qmodel(X)
        loaded = QuantModel.load(qmodel.save(tmp_path / "saved"), Residual())
        assert isinstance(loaded.sites["fc.weight"], LSQ) and loaded.plan["fc.input"].quantizer == "pact"
        assert torch.equal(loaded(X), expected)
        for again in (copy.deepcopy(qmodel), copy.deepcopy(loaded)):
            assert torch.equal(again(X), expected)

    def test_options_are_saved(self, tmp_path: Path) -> None:
        class ShiftOptions(Section):
            SHIFT: float = Field(0.0, description="Added before rounding.")

        @register_quantizer("shifted_for_test", options=ShiftOptions)
        class Shifted(Quantizer):
            options: ShiftOptions

            def transform(self, x: Tensor) -> Tensor:
                return x + self.options.SHIFT

        try:
            qmodel = residual()
            change = {"quantizer": "shifted_for_test", "quantizer_options": ShiftOptions(SHIFT=0.25)}
            qmodel.replace_quantizer("fc.weight", change)
            loaded = QuantModel.load(qmodel.save(tmp_path / "saved"), Residual())
            assert loaded.sites["fc.weight"].options == ShiftOptions(SHIFT=0.25)
            assert torch.equal(loaded(X), qmodel(X))
            again = Plan.from_dict(json.loads(qmodel.plan.to_json()))
            assert again["fc.weight"].quantizer_options == ShiftOptions(SHIFT=0.25)
        finally:
            QUANTIZERS._entries.pop("shifted_for_test", None)
            QUANTIZERS._options.pop("shifted_for_test", None)

    def test_a_moving_average_is_saved(self, tmp_path: Path) -> None:
        changes = {"A.OBSERVER.TYPE": "moving_average", "A.OBSERVER.MOVING_AVERAGE.EMA_RATIO": 0.5}
        qmodel = residual(changes=changes)
        assert qmodel.plan["fc.input"].ema_ratio == 0.5
        qmodel.replace_quantizer("fc.weight", {"bits": 4})
        loaded = QuantModel.load(qmodel.save(tmp_path / "saved"), Residual())
        assert loaded.sites["fc.input"].ema_ratio == 0.5

    @pytest.mark.parametrize(
        ("make", "told"),
        [
            (lambda q: LSQ(q["fc.weight"].spec, "activation"), "needs target='weight', observed_as='weight'"),
            (lambda q: q["stem.conv.weight"], "is that of 'stem.conv.weight' already"),
            (
                lambda q: type("Own", (Quantizer,), {})(q["fc.weight"].spec, "weight", num_scales=10),
                "is not registered",
            ),
            (lambda q: LSQ(q["fc.weight"].spec, "weight", num_scales=3), "has 3 scales, and a weight of shape"),
            (lambda q: None, "allowed: a Quantizer, a Site, or fields"),
            (lambda q: {"bit": 4}, "a site has no 'bit'"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, make: Any, told: str) -> None:
        qmodel = residual()
        before, plan = qmodel(X), qmodel.plan
        with pytest.raises((ConfigError, SpecError), match=told):
            qmodel.replace_quantizer("fc.weight", make(qmodel.sites))
        assert qmodel.plan is plan and torch.equal(qmodel(X), before)

    @pytest.mark.parametrize(
        ("backend", "change", "changes"),
        [
            ("tensorrt", {"symmetric": False}, {}),
            ("tensorrt", {"granularity": PerGroup(1, 3), "bits": 4}, {"A.QUANTIZER.DISABLE": True}),
        ],
        ids=["affine", "groups that are not whole"],
    )
    def test_what_the_backend_does_not_run_is_refused(
        self, backend: str, change: dict[str, Any], changes: dict[str, Any]
    ) -> None:
        qmodel = residual(backend, changes)
        with pytest.raises(BackendError, match="fc"):
            qmodel.replace_quantizer("fc.weight", change)

    def test_in_train_mode(self) -> None:
        qmodel = residual("onnxruntime").train()
        norm = nn.BatchNorm2d(4)
        qmodel.model.add_module("held_by_the_user", norm.eval())
        new = qmodel.replace_quantizer("fc.weight", {"quantizer": "lsq"})
        assert qmodel.training and new.training and not norm.training
        kernels = [module for module in qmodel.modules() if isinstance(module, (IntegerLayer, IntegerAdd))]
        assert kernels and all(kernel.training for kernel in kernels)
        qmodel(X).sum().backward()
        assert new.scale.grad is not None

    def test_a_quantizer_that_is_fused_for_training(self) -> None:
        """It is replaced, and the model trains with the one that it shows."""
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval()
        x = torch.randn(8, 4)
        qmodel = calibrated(model, [x], qconfig({"A.QUANTIZER.TYPE": "lsq"})).train()
        qmodel(x).sum().backward()
        new = qmodel.replace_quantizer("2.input", {"bits": 3, "symmetric": True})
        assert qmodel.sites["2.input"] is new and qmodel.training
        found = qmodel(x)
        found.sum().backward()
        assert new.scale.grad is not None
        qmodel.accelerate(False)
        torch.testing.assert_close(found, qmodel(x))

    def test_not_during_calibration(self) -> None:
        qmodel = QuantModel(Residual(), qconfig())
        qmodel.prepare_calibration()
        with pytest.raises(CalibrationError, match="during calibration"):
            qmodel.replace_quantizer("fc.weight", {"bits": 4})
        with pytest.raises(CalibrationError, match="during calibration"):
            qmodel.store_qparams("fc.weight", 0.1)

    def test_the_first_call_is_still_compared(self) -> None:
        qmodel = QuantModel(Residual(), qconfig())
        qmodel.replace_quantizer("fc.weight", {"quantizer": "lsq"})
        assert qmodel.proof.why_not_comparable() == ""

    def test_a_site_that_calibration_never_reached_stays_off(self) -> None:
        qmodel = residual()
        quantizer = qmodel.sites["fc.input"]
        quantizer.set_fake_fused()
        quantizer.was_unseen = True
        new = qmodel.replace_quantizer("fc.input", {"bits": 4})
        assert new.fake_fused and new.was_unseen
        qmodel.store_qparams("fc.input", 0.1)
        assert not new.fake_fused and new.is_calibrated


class TestStoreQparams:
    def test_in_place(self) -> None:
        qmodel = residual()
        scale, zero_point = qmodel.sites["fc.weight"].scale, qmodel.sites["fc.weight"].zero_point
        qmodel.store_qparams("fc.weight", scale * 2)
        assert qmodel.sites["fc.weight"].scale is scale and qmodel.sites["fc.weight"].zero_point is zero_point

    def test_what_is_stored_is_used(self) -> None:
        qmodel = residual()
        scale, zero_point = (number.clone() for number in qmodel.sites["fc.input"].qparams())
        qmodel.store_qparams("fc.input", 0.5, 3)
        found = qmodel.sites["fc.input"]
        assert (float(found.scale), float(found.zero_point)) == (0.5, 3.0)
        qmodel.store_qparams("fc.input", scale, zero_point)
        assert torch.equal(qmodel(X), residual()(X))

    def test_one_number_for_all_channels(self) -> None:
        qmodel = residual()
        num_scales = qmodel.sites["fc.weight"].scale.numel()
        qmodel.store_qparams("fc.weight", 0.01)
        assert torch.equal(qmodel.sites["fc.weight"].scale, torch.full((num_scales,), 0.01))

    def test_a_learned_scale_stays_the_parameter(self) -> None:
        qmodel = residual(changes={"W.QUANTIZER.TYPE": "lsq"})
        parameter = qmodel.sites["fc.weight"].scale
        qmodel.store_qparams("fc.weight", 0.02)
        assert qmodel.sites["fc.weight"].scale is parameter and isinstance(parameter, nn.Parameter)
        assert float(parameter.detach()[0]) == pytest.approx(0.02)

    def test_it_calibrates(self) -> None:
        qmodel = QuantModel(nn.Sequential(nn.Linear(4, 4)).eval(), qconfig())
        qmodel.store_qparams("0.weight", torch.full((4,), 0.1))
        qmodel.store_qparams("0.input", 0.1, 7)
        qmodel.set_quant(w_quant=True, a_quant=True)
        assert qmodel(torch.ones(1, 4)).shape == (1, 4)

    def test_an_activation_per_channel(self) -> None:
        qmodel = QuantModel(Residual(), qconfig({"A.QSCHEME": "per-channel-affine"}))
        qmodel.store_qparams("fc.input", torch.full((16,), 0.1), 2)
        assert qmodel.sites["fc.input"].scale.shape == qmodel.sites["fc.input"].zero_point.shape == (16,)
        with pytest.raises(SpecError, match="allowed: 1 or 16"):
            qmodel.store_qparams("fc.input", torch.full((3,), 0.1))

    @pytest.mark.parametrize(
        ("site", "numbers", "error", "told"),
        [
            ("fc.weight", (0.0,), CalibrationError, "scale from 0, .* allowed: finite scales"),
            ("fc.weight", (-0.1,), CalibrationError, "scale from -0.1"),
            ("fc.weight", (float("nan"),), CalibrationError, "scale from nan"),
            ("fc.weight", (float("inf"),), CalibrationError, "scale from inf"),
            ("fc.weight", (0.1, 1), CalibrationError, "zero points 0 to 0"),
            ("fc.weight", (torch.ones(3),), SpecError, "3 scales or zero points with PerChannel"),
            ("fc.input", (torch.ones(2),), SpecError, "2 scales or zero points with PerTensor"),
            ("fc.input", (0.1, 256), CalibrationError, "zero point 256.* with uint8; allowed: .* 0 to 255"),
            ("fc.input", (0.1, float("nan")), CalibrationError, "zero point nan"),
            ("fc.input", (0.1, -1), CalibrationError, "zero point -1"),
        ],
    )
    def test_other_numbers_are_refused(self, site: str, numbers: Any, error: type[Exception], told: str) -> None:
        qmodel = residual()
        before = qmodel(X)
        with pytest.raises(error, match=told):
            qmodel.store_qparams(site, *numbers)
        assert torch.equal(qmodel(X), before)

    def test_a_quantizer_with_other_numbers_is_named(self) -> None:
        qmodel = residual(changes={"A.QUANTIZER.TYPE": "pact"})
        with pytest.raises(ConfigError, match=r"'pact' computes its scale from other numbers \(alpha\)"):
            qmodel.store_qparams("fc.input", 0.1)

    def test_a_bias_keeps_its_room(self) -> None:
        qmodel = residual("onnxruntime")
        qmodel.store_qparams("fc.weight", 1e-20)
        assert float(qmodel.sites["fc.weight"].scale.min()) > 1e-20


class TestWords:
    """`activation` is the word; `feature`, which the first Sparsebit had, works too."""

    def test_is_quantized(self) -> None:
        qmodel = residual()
        qmodel.set_quant(w_quant=True, a_quant=False)
        assert qmodel.is_quantized("weight")
        assert not qmodel.is_quantized("activation") and not qmodel.is_quantized("feature")
        qmodel.set_quant(w_quant=False, a_quant=True)
        assert qmodel.is_quantized("activation") and qmodel.is_quantized("feature")

    @pytest.mark.parametrize("word", ["activation", "feature"])
    def test_a_quantizers_target(self, word: str) -> None:
        """Code that asks for the older word finds the same quantizers."""
        qmodel = residual()
        found = [name for name, quantizer in qmodel.sites.items() if quantizer.target == word]
        assert found == [name for name, site in qmodel.plan.items() if site.role != "weight"] != []
        assert all(q.observed_as == q.observer.target == word for q in qmodel.quantizers() if q.target == word)
        assert not any(quantizer.target == "weight" for quantizer in map(qmodel.sites.get, found) if quantizer)

    @pytest.mark.parametrize("word", ["activation", "feature"])
    def test_a_quantizer_of_ones_own(self, word: Any) -> None:
        qmodel = residual()
        old = qmodel.sites["fc.input"]
        new = Quantizer(TensorSpec(4, False), word, observed_as=word)
        assert new.target == new.observed_as == new.observer.target == "activation" and str(new.target) == "activation"
        assert copy.deepcopy(new).target == "feature"
        assert new.target == old.target and repr(new.observer).endswith("target='activation')")

    @pytest.mark.parametrize("word", ["features", "input"])
    def test_other_words_are_refused(self, word: Any) -> None:
        with pytest.raises(ConfigError, match=f"target '{word}'; allowed: 'weight', 'activation'"):
            Quantizer(TensorSpec(8, False), word)
        with pytest.raises(ConfigError, match=f"target '{word}'; allowed: 'weight', 'activation'"):
            residual().is_quantized(word)

    @pytest.mark.parametrize("word", ["activation", "feature"])
    def test_targets(self, word: str) -> None:
        name = f"for_{word}_for_test"
        register_quantizer(name)(type("Own", (Quantizer,), {"TARGETS": (word,)}))
        try:
            assert residual(changes={"A.QUANTIZER.TYPE": name}).plan["fc.input"].quantizer == name
            with pytest.raises(ConfigError, match=name):
                residual(changes={"W.QUANTIZER.TYPE": name})
            qmodel = residual()
            with pytest.raises((ConfigError, BackendError), match="not for a weight"):
                qmodel.replace_quantizer("fc.weight", {"quantizer": name})
        finally:
            QUANTIZERS._entries.pop(name)
