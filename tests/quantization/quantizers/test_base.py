from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsebit.errors import BackendError, CalibrationError, ConfigError, SpecError
from sparsebit.numerics import reference
from sparsebit.numerics.spec import PerChannel, PerGroup, PerTensor, TensorSpec
from sparsebit.quantization import Quantizer, parse_qconfig, register_quantizer
from sparsebit.quantization.quantizers.registration import build_quantizer
from sparsebit.registry import QUANTIZERS
from tests.quantization.tiny import calibrated, qconfig, simulated, site

UINT8 = TensorSpec(8, False, PerTensor())
INT8 = TensorSpec(8, True, PerTensor())


def quantizer(
    kind: str = "uniform", spec: TensorSpec = UINT8, target: Any = "activation", **settings: Any
) -> Quantizer:
    return build_quantizer(kind, spec, target, name="layer.input", **settings)


def calibrate(kind: Quantizer, x: Tensor) -> Quantizer:
    kind.update_observer(x)
    kind.calc_qparams()
    return kind


def test_off_gives_the_very_tensor() -> None:
    x = torch.randn(4)
    assert quantizer()(x) is x


def test_on_is_the_reference() -> None:
    x = torch.randn(100)
    on = calibrate(quantizer(), x)
    on.enable_quant()
    assert torch.equal(on(x), simulated(on, x))
    on.disable_quant()
    assert on(x) is x


@pytest.mark.parametrize("value", [3, None, "text", torch.arange(3), torch.ones(2, dtype=torch.bool)])
def test_what_is_no_float_tensor_passes(value: Any) -> None:
    on = calibrate(quantizer(), torch.randn(9))
    on.enable_quant()
    assert on(value) is value


def test_on_before_calibration_says_what_to_do() -> None:
    with pytest.raises(CalibrationError, match=r"layer.input has no scale yet; call prepare_calibration\(\), run"):
        quantizer().enable_quant()


def test_calc_qparams_without_data_says_what_to_do() -> None:
    with pytest.raises(CalibrationError, match=r"layer.input: no data was observed; run forwards between"):
        quantizer().calc_qparams()


def test_nan_is_refused_with_the_sites_name() -> None:
    with pytest.raises(CalibrationError, match=r"layer.input: .*NaN"):
        quantizer().update_observer(torch.tensor([1.0, float("nan")]))


def test_statistics_are_dropped_after_use() -> None:
    assert calibrate(quantizer(), torch.randn(9)).observer.is_empty


def test_dequantized_range() -> None:
    low, high = calibrate(quantizer(), torch.tensor([-1.0, 2.0])).dequantized_range()
    assert low == pytest.approx(-1, abs=0.012) and high == pytest.approx(2, abs=0.012)
    assert high - low == pytest.approx(3, rel=1e-6)


class TestFakeFused:
    @pytest.mark.parametrize("kind", ["uniform", "lsq", "lsq+", "pact"])
    def test_off_for_good_with_neutral_numbers_and_no_gradient(self, kind: str) -> None:
        off = calibrate(quantizer(kind), torch.randn(9))
        off.enable_quant()
        off.set_fake_fused()
        x = torch.randn(3)
        assert not off.is_enable and off(x) is x
        assert not any(parameter.requires_grad for parameter in off.parameters())
        if kind != "pact":
            assert off.scale == 1 and off.zero_point == 0
        off.enable_quant()  # no complaint, no effect
        assert off(x) is x
        assert off.summary() == "off"

    def test_it_is_not_observed(self) -> None:
        off = quantizer()
        off.observing = True
        off.set_fake_fused()
        off(torch.randn(3))
        assert off.observer.is_empty

    def test_disable_in_the_config_does_the_same_at_construction(self) -> None:
        config = qconfig({"A.QUANTIZER": {"DISABLE": True}})
        qmodel = calibrated(nn.Sequential(nn.Linear(3, 2)), [torch.randn(4, 3)], config)
        assert site(qmodel, "0.input").fake_fused and site(qmodel, "0.weight").is_enable


class TestSetBit:
    def test_the_range_stays(self) -> None:
        eight = calibrate(quantizer(), torch.tensor([-1.0, 2.0]))
        eight.set_bit(4)
        assert eight.spec.bits == 4 and eight.scale == pytest.approx(3 / 15, rel=0.02)
        four_again = float(eight.scale)
        eight.set_bit(4)
        assert eight.scale == four_again

    def test_before_calibration(self) -> None:
        other = quantizer(spec=INT8)
        other.set_bit(2)
        calibrate(other, torch.tensor([-1.0, 1.0]))
        assert other.spec.qmin == -2 and other.scale == pytest.approx(1)

    @pytest.mark.parametrize("kind", ["lsq", "pact"])
    def test_learned_numbers_stay_the_same_objects(self, kind: str) -> None:
        learned = calibrate(quantizer(kind), torch.rand(50) * 12)
        before = {name: id(parameter) for name, parameter in learned.named_parameters()}
        low, high = learned.dequantized_range()
        learned.set_bit(4)
        assert {name: id(parameter) for name, parameter in learned.named_parameters()} == before
        assert torch.allclose(torch.stack(learned.dequantized_range()), torch.stack([low, high]), rtol=0.02)

    def test_what_the_backend_cannot_run_is_refused_and_nothing_changes(self) -> None:
        eight = calibrate(quantizer(spec=INT8, backend="tensorrt"), torch.randn(9))
        scale = eight.scale.clone()
        with pytest.raises(BackendError, match=r"5-bit per-tensor-symmetric at layer.input"):
            eight.set_bit(5)
        assert eight.spec.bits == 8 and eight.scale == scale

    def test_senseless_bits_are_refused(self) -> None:
        with pytest.raises(SpecError, match="17"):
            quantizer().set_bit(17)


class TestSetBackend:
    def test_moves(self) -> None:
        moved = calibrate(quantizer(spec=INT8), torch.randn(9))
        moved.set_backend("tensorrt")
        assert moved.backend == "tensorrt"

    def test_a_zero_point_is_refused_with_the_sites_name(self) -> None:
        affine = calibrate(quantizer(), torch.randn(9))
        with pytest.raises(BackendError, match=r"layer.input.*tensorrt"):
            affine.set_backend("tensorrt")
        assert affine.backend == "virtual"

    def test_numbers_are_refused_when_they_are_made(self) -> None:
        with pytest.raises(BackendError, match=r"layer.input.*tensorrt"):
            calibrate(quantizer(backend="tensorrt"), torch.randn(9))


class TestState:
    def test_a_checkpoint_brings_its_own_shape(self) -> None:
        spec = TensorSpec(8, False, PerChannel(1))
        source = calibrate(quantizer(spec=spec), torch.randn(2, 5, 3))
        fresh = quantizer(spec=spec)
        fresh.load_state_dict(source.state_dict())
        assert fresh.scale.shape == (5,) and fresh.is_calibrated
        fresh.enable_quant()

    @pytest.mark.parametrize("kind", ["lsq", "lsq+", "pact"])
    def test_loading_keeps_learned_parameters_the_same_objects(self, kind: str) -> None:
        spec = TensorSpec(8, False, PerChannel(1))
        source, fresh = calibrate(quantizer(kind, spec), torch.randn(2, 5, 3)), quantizer(kind, spec)
        before = {name: id(parameter) for name, parameter in fresh.named_parameters()}
        fresh.load_state_dict(source.state_dict())
        assert {name: id(parameter) for name, parameter in fresh.named_parameters()} == before
        assert all(parameter.shape == (5,) for parameter in fresh.parameters())

    def test_one_that_went_off_is_off_again(self) -> None:
        source, fresh = quantizer("lsq"), quantizer("lsq")
        source.set_fake_fused()
        fresh.load_state_dict(source.state_dict())
        assert fresh.fake_fused and fresh.was_unseen and not fresh.scale.requires_grad
        fresh.revive()
        assert not fresh.fake_fused and fresh.scale.requires_grad

    def test_one_that_a_pass_switched_off_is_not_revived(self) -> None:
        off = quantizer()
        off.set_fake_fused()
        off.revive()
        assert off.fake_fused

    def test_deepcopy_is_independent(self) -> None:
        one = calibrate(quantizer(), torch.randn(9))
        other = copy.deepcopy(one)
        calibrate(other, torch.randn(9) * 5)
        assert other.scale > one.scale


class TestShapes:
    """Broadcasting is derived from the input, at the time of use."""

    @pytest.mark.parametrize(
        ("granularity", "shape", "num_scales"),
        [(PerChannel(1), (2, 3, 4, 4), 3), (PerChannel(-1), (2, 5, 3), 3), (PerGroup(1, 4), (3, 10), 9)],
        ids=["NCHW", "NLC", "groups"],
    )
    def test_one_scale_per_row(self, granularity: Any, shape: tuple[int, ...], num_scales: int) -> None:
        x = torch.randn(shape)
        on = calibrate(quantizer(spec=TensorSpec(4, True, granularity), target="weight"), x)
        on.enable_quant()
        assert on.scale.shape == (num_scales,)
        assert torch.equal(on(x), simulated(on, x))

    def test_another_batch_size_and_rank_of_the_same_channels(self) -> None:
        on = calibrate(quantizer(spec=TensorSpec(8, False, PerChannel(1))), torch.randn(2, 3, 4))
        on.enable_quant()
        for x in (torch.randn(7, 3, 9), torch.randn(1, 3)):
            assert torch.equal(on(x), simulated(on, x))


class TestRepr:
    def test_numbers_show_once_they_are_there(self) -> None:
        shown = quantizer()
        assert shown.summary() == "uint8 uncalibrated"
        calibrate(shown, torch.tensor([0.0, 255.0]))
        assert shown.summary() == "uint8 scale=1 zero_point=0 (off)"
        shown.enable_quant()
        assert repr(shown) == "Uniform(uniform uint8 scale=1 zero_point=0)"

    def test_many_scales_as_a_range(self) -> None:
        shown = calibrate(quantizer(spec=TensorSpec(4, True, PerChannel(0))), torch.tensor([[7.0], [14.0]]))
        shown.enable_quant()
        assert shown.summary() == "int4 scale=[1..2]x2 zero_point=[0..0]"


class TestRegistration:
    def test_a_quantizer_of_ones_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(QUANTIZERS, "_entries", dict(QUANTIZERS._entries))

        @register_quantizer("Halving")
        class Halving(Quantizer):
            def transform(self, x: Tensor) -> Tensor:
                return x / 2

        config = qconfig({"A.QUANTIZER.TYPE": "HALVING"})
        model, x = nn.Sequential(nn.Linear(3, 2)), torch.randn(4, 3)
        qmodel = calibrated(model, [x], config)
        mine = site(qmodel, "0.input")
        assert isinstance(mine, Halving) and mine.TYPE == "halving"
        expected = reference.fake_quantize(x / 2, mine.scale, mine.zero_point, mine.spec)
        assert torch.equal(mine(x), expected)

    def test_a_name_is_taken_once(self) -> None:
        with pytest.raises(ConfigError, match="'uniform' is already registered"):

            @register_quantizer("uniform")
            class Another(Quantizer): ...

    def test_what_is_no_quantizer_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="in a subclass of Quantizer"):
            register_quantizer("thing")(nn.Linear)  # type: ignore[type-var]

    @pytest.mark.parametrize(("kind", "target"), [("dorefa", "activation"), ("fp8", "activation"), ("pact", "weight")])
    def test_a_quantizer_for_other_tensors_is_refused(self, kind: str, target: str) -> None:
        with pytest.raises(BackendError, match=rf"layer.input: quantizer '{kind}' is for .* not for an? {target}"):
            quantizer(kind, target=target)

    @pytest.mark.parametrize("name", ["LSQ", "lsq_plus", "LSQ_Plus", "Lsq+", "UNIFORM", "PACT"])
    def test_names_in_any_case(self, name: str) -> None:
        assert parse_qconfig(f"{{W: {{QUANTIZER: {{BIT: 8}}}}, A: {{QUANTIZER: {{BIT: 8, TYPE: {name}}}}}}}")


def test_describe_goes_to_json() -> None:
    assert calibrate(quantizer(), torch.randn(3)).describe() == {
        "quantizer": "uniform",
        "bits": 8,
        "symmetric": False,
        "granularity": "PerTensor()",
        "observer": "minmax",
        "calibrated": True,
    }


class TestNamesOfTheFirstSparsebit:
    def test_parts_of_the_spec(self) -> None:
        quantizer = Quantizer(TensorSpec(4, True, PerChannel(1)), "activation", num_scales=3)
        assert (quantizer.bit, quantizer.ch_axis, quantizer.is_symmetric, quantizer.is_perchannel) == (4, 1, True, True)
        quantizer = Quantizer(TensorSpec(8, False), "activation")
        assert (quantizer.bit, quantizer.ch_axis, quantizer.is_symmetric, quantizer.is_perchannel) == (
            8,
            0,
            False,
            False,
        )
        quantizer.set_bit(bit=2)
        assert quantizer.bit == 2

    def test_numbers_are_returned(self) -> None:
        quantizer = Quantizer(TensorSpec(8, False), "activation")
        scale, zero_point = quantizer.calc_qparams_with_minmax(torch.tensor(-1.0), torch.tensor(1.55))
        assert (float(scale), float(zero_point)) == (pytest.approx(0.01), 100)
        quantizer.update_observer(torch.tensor([0.0, 2.55]))
        assert float(quantizer.calc_qparams()[0]) == pytest.approx(0.01)

    def test_off_for_good_stays_so(self) -> None:
        quantizer = Quantizer(TensorSpec(8, False), "activation")
        quantizer.set_fake_fused()
        numbers = quantizer.calc_qparams_with_minmax(torch.tensor(-1.0), torch.tensor(1.0))
        assert [float(number) for number in numbers] == [1, 0] == [float(number) for number in quantizer.calc_qparams()]
        assert quantizer.fake_fused and not quantizer.is_calibrated


def test_tensorrt_refuses_zero_points_when_they_are_loaded() -> None:
    quantizer = Quantizer(TensorSpec(8, True), "activation", name="fc.input", backend="tensorrt")
    state = quantizer.state_dict() | {"zero_point": torch.tensor(3.0)}
    with pytest.raises(RuntimeError, match=r"fc\.input.*zero point"):
        quantizer.load_state_dict(state)


def test_a_negative_scale_is_loaded_by_its_magnitude() -> None:
    """A learned scale may cross zero in training; calibrated step sizes load what was learned."""
    learned = build_quantizer("lsq", TensorSpec(8, True, PerTensor()), "weight", name="w")
    learned.calc_qparams_with_minmax(torch.tensor(-1.0), torch.tensor(1.0))
    with torch.no_grad():
        learned.scale.neg_()
    fixed = build_quantizer("uniform", TensorSpec(8, True, PerTensor()), "weight", name="w")
    fixed.load_state_dict(learned.state_dict())
    assert float(fixed.qparams()[0]) == float(learned.qparams()[0].detach()) > 0


class TestStoreQparams:
    def test_what_is_stored_is_used(self) -> None:
        quantizer = Quantizer(TensorSpec(8, False), "activation", name="x")
        scale = quantizer.scale
        quantizer.store_qparams(0.5, 3)
        quantizer.enable_quant()
        assert quantizer.scale is scale and quantizer.is_calibrated
        assert torch.equal(quantizer(torch.tensor([0.6, -9.0])), torch.tensor([0.5, -1.5]))

    def test_a_weight_has_as_many_scales_as_it_was_built_for(self) -> None:
        quantizer = Quantizer(TensorSpec(8, True, PerChannel(0)), "weight", name="w", num_scales=3)
        quantizer.store_qparams(torch.tensor([1.0, 2.0, 3.0]))
        assert quantizer.scale.tolist() == [1.0, 2.0, 3.0] and quantizer.zero_point.tolist() == [0.0, 0.0, 0.0]
        with pytest.raises(SpecError, match=r"w: 2 scales or zero points .*; allowed: 1 or 3"):
            quantizer.store_qparams(torch.ones(2))
        assert quantizer.scale.tolist() == [1.0, 2.0, 3.0]

    def test_one_that_others_replace_names_them(self) -> None:
        quantizer, other = (Quantizer(TensorSpec(8, False), "activation", name=name) for name in ("x", "y"))
        quantizer.set_fake_fused()
        quantizer.replaced_by["y"] = other
        with pytest.raises(ConfigError, match=r"x\.store_qparams\(\): this quantizer is off.*quantized by y"):
            quantizer.store_qparams(0.1)

    def test_a_class_may_set_the_numbers_that_it_computes_its_scale_from(self) -> None:
        class Halved(Quantizer):
            def make_parameters(self, num_scales: int) -> None:
                super().make_parameters(num_scales)
                del self._buffers["scale"]
                self.twice = nn.Parameter(torch.ones(()))

            scale = property(lambda self: self.twice.detach() / 2)  # type: ignore[assignment]

            def qparams(self) -> tuple[Tensor, Tensor]:
                return self.twice / 2, self.zero_point

        with pytest.raises(ConfigError, match=r"computes its scale from other numbers \(twice\); .* in its class"):
            Halved(TensorSpec(8, True), "activation", name="x").store_qparams(0.1)

        class Storing(Halved):
            def store_qparams(self, scale: Tensor | float, zero_point: Tensor | float = 0) -> None:
                self.twice.data.fill_(float(scale) * 2)

        quantizer = Storing(TensorSpec(8, True), "activation", name="x")
        quantizer.store_qparams(0.25)
        assert float(quantizer.scale) == 0.25
