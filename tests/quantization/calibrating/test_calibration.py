from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.errors import CalibrationError
from sparsebit.execution.blocks.value_store import SharedData
from sparsebit.numerics.qparams import qparams_from_range
from sparsebit.quantization import QuantModel
from sparsebit.quantization.ops.quant_opr import WeightedQuantOpr
from tests.quantization.tiny import Opaque, Residual, TwoLayers, calibrated, qconfig, run, simulated, site, sites

OBSERVERS = ["minmax", "moving_average", "percentile", "mse", "kl_histogram", "aciq"]


def scales(qmodel: QuantModel) -> dict[str, list[float]]:
    return {quantizer.name: quantizer.scale.reshape(-1).tolist() for quantizer in qmodel.quantizers()}


class TestOrderOfVerbs:
    def test_set_quant_before_calibration(self) -> None:
        with pytest.raises(
            CalibrationError, match=r"has no scale yet; call prepare_calibration\(\), run a few batches"
        ):
            QuantModel(TwoLayers(), qconfig()).set_quant(w_quant=True)

    def test_a_refused_set_quant_switches_nothing(self) -> None:
        qmodel = calibrated(TwoLayers(), [torch.randn(4, 6)])
        qmodel.set_quant()
        site(qmodel, "second.input").calibrated.fill_(False)
        with pytest.raises(CalibrationError, match=r"second.input has no scale yet"):
            qmodel.set_quant(w_quant=True, a_quant=True)
        assert not any(quantizer.use_quant for quantizer in qmodel.quantizers())

    def test_calc_qparams_before_prepare(self) -> None:
        with pytest.raises(CalibrationError, match=r"calc_qparams\(\) before prepare_calibration\(\)"):
            QuantModel(TwoLayers(), qconfig()).calc_qparams()

    def test_no_batch_is_an_error_that_can_be_mended(self) -> None:
        qmodel = QuantModel(TwoLayers(), qconfig())
        qmodel.prepare_calibration()
        with pytest.raises(CalibrationError, match="no batch was run since prepare_calibration"):
            qmodel.calc_qparams()
        run(qmodel, [torch.randn(4, 6)])
        qmodel.calc_qparams()
        qmodel.set_quant(w_quant=True, a_quant=True)
        assert len(sites(qmodel)) == 4

    def test_asym_without_inputs_is_an_error_that_can_be_mended(self) -> None:
        qmodel = QuantModel(TwoLayers(), qconfig())
        qmodel.prepare_calibration(keep_inputs=False)
        run(qmodel, [torch.randn(4, 6)])
        with pytest.raises(CalibrationError, match="keep_inputs=True"):
            qmodel.calc_qparams(asym=True)
        qmodel.calc_qparams()
        assert all(quantizer.is_calibrated for quantizer in qmodel.quantizers())

    def test_weights_alone_need_no_batch(self) -> None:
        qmodel = QuantModel(TwoLayers(), qconfig({"A.QUANTIZER": {"DISABLE": True}}))
        qmodel.prepare_calibration()
        qmodel.calc_qparams()
        qmodel.set_quant(w_quant=True)
        assert sites(qmodel) == {"first.weight", "second.weight"}

    def test_calibration_leaves_everything_off_and_in_eval_mode(self) -> None:
        qmodel = QuantModel(TwoLayers(), qconfig()).train()
        qmodel.prepare_calibration()
        assert not qmodel.training
        x = torch.randn(4, 6)
        run(qmodel, [x])
        qmodel.calc_qparams()
        assert not any(quantizer.use_quant or quantizer.observing for quantizer in qmodel.quantizers())
        assert torch.equal(qmodel(x), qmodel.original(x))

    def test_a_second_calibration_starts_afresh(self) -> None:
        qmodel = calibrated(TwoLayers(), [100 * torch.randn(4, 6)])
        before = float(site(qmodel, "first.input").scale)
        qmodel.prepare_calibration()
        run(qmodel, [torch.randn(4, 6)])
        qmodel.calc_qparams()
        assert site(qmodel, "first.input").scale < before / 10

    def test_switches_are_separate(self) -> None:
        qmodel = calibrated(TwoLayers(), [torch.randn(4, 6)])
        qmodel.set_quant(w_quant=True)
        assert qmodel.is_quantized("weight") and not qmodel.is_quantized("activation")
        qmodel.set_quant(a_quant=True)
        assert qmodel.is_quantized("activation") and not qmodel.is_quantized("weight")

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
    def test_under_any_grad_mode(self, mode: Any) -> None:
        qmodel = QuantModel(TwoLayers(), qconfig({"A.OBSERVER.TYPE": "mse"}))
        qmodel.prepare_calibration()
        with mode():
            for x in torch.randn(2, 4, 6):
                qmodel(x)
        qmodel.calc_qparams(asym=True)
        qmodel.set_quant(w_quant=True, a_quant=True)
        qmodel(torch.randn(4, 6)).sum().backward()


class TestData:
    @pytest.mark.parametrize("observer", OBSERVERS)
    def test_ragged_last_batch_equals_one_batch(self, observer: str) -> None:
        model, x = TwoLayers(), torch.randn(50, 6)
        # Only a moving average knows of batches.
        config = qconfig({"A.OBSERVER.TYPE": observer, "A.OBSERVER.MOVING_AVERAGE": {"EMA_RATIO": 0.0}})
        parts = calibrated(model, x.split(16), config)
        whole = calibrated(model, [x[48:] if observer == "moving_average" else x], config)
        for name, scale in scales(parts).items():
            assert scale == pytest.approx(scales(whole)[name], rel=1e-6)

    def test_varying_shapes(self) -> None:
        model = Residual().eval()
        batches = [torch.randn(2, 3, 8, 8), torch.randn(1, 3, 12, 6), torch.randn(5, 3, 4, 4)]
        qmodel = calibrated(model, batches)
        flat = torch.cat([batch.flatten() for batch in batches])
        expected, _ = qparams_from_range(flat.min(), flat.max(), site(qmodel, "stem.conv.input").spec)
        assert site(qmodel, "stem.conv.input").scale == expected

    @pytest.mark.parametrize("asym", [False, True], ids=["plain", "asym"])
    def test_several_inputs_by_position_name_and_dict(self, asym: bool) -> None:
        class Two(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = nn.Linear(6, 4), nn.Linear(3, 4)

            def forward(self, x: Tensor, pair: dict[str, Tensor], scale: float = 1.0) -> Tensor:
                return self.a(x) * self.b(pair["y"]) * scale

        model, x, y = Two(), torch.randn(4, 6), torch.randn(4, 3)
        results = []
        for args, kwargs in (((x, {"y": y}), {}), ((x,), {"pair": {"y": y}}), ((), {"x": x, "pair": {"y": y}})):
            qmodel = QuantModel(model, qconfig())
            qmodel.prepare_calibration()
            qmodel(*args, **kwargs)
            qmodel.calc_qparams(asym=asym)
            results.append(scales(qmodel))
        assert results[0] == results[1] == results[2]
        assert results[0]["b.input"] != [1]

    @pytest.mark.parametrize("asym", [False, True], ids=["plain", "asym"])
    def test_optional_inputs_first_shown_in_calibration(self, asym: bool) -> None:
        class Masked(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fc = nn.Linear(6, 4)

            def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
                x = self.fc(x)
                return x if mask is None else torch.sigmoid(x * mask)

        model, x, mask = Masked(), torch.randn(4, 6), torch.rand(4, 1)
        qmodel = QuantModel(model, qconfig())
        qmodel.prepare_calibration()
        assert torch.equal(qmodel(x, mask=mask), model(x, mask))
        qmodel.calc_qparams(asym=asym)
        assert {"mul.input.0", "mul.input.1", "sigmoid.input"} <= sites(qmodel)

    def test_reused_input_buffers_are_copied(self) -> None:
        batches = torch.randn(3, 4, 6)
        expected = calibrated(TwoLayers(), batches, asym=True)
        buffer = torch.empty(4, 6)

        def refilled() -> Iterator[Tensor]:
            for batch in batches:
                yield buffer.copy_(batch)

        qmodel = calibrated(expected.original, refilled(), asym=True)
        assert scales(qmodel) == scales(expected)

    def test_bf16_model(self) -> None:
        model, x = TwoLayers().bfloat16(), torch.randn(4, 6, dtype=torch.bfloat16)
        qmodel = calibrated(model, [x])
        assert qmodel(x).dtype == torch.bfloat16 and bool(qmodel(x).isfinite().all())

    def test_nan_names_the_layer(self) -> None:
        qmodel = QuantModel(TwoLayers(), qconfig())
        qmodel.prepare_calibration()
        with pytest.raises(CalibrationError, match=r"first.input: .*NaN"):
            qmodel(torch.full((2, 6), float("nan")))


class TestPerChannelActivations:
    @pytest.mark.parametrize("observer", OBSERVERS)
    def test_nchw_with_batches_of_different_size(self, observer: str) -> None:
        config = qconfig({"A.QSCHEME": "per-channel-affine", "A.OBSERVER.TYPE": observer})
        batches = [torch.randn(4, 3, 8, 8), torch.randn(1, 3, 8, 8)]
        qmodel = calibrated(Residual().eval(), batches, config)
        assert site(qmodel, "stem.conv.input").scale.shape == (3,)
        assert site(qmodel, "conv.input").scale.shape == (4,)
        assert qmodel(torch.randn(7, 3, 6, 6)).isfinite().all()

    def test_nlc_has_its_channels_last(self) -> None:
        config = qconfig({"A.QSCHEME": "per-channel-symmetric", "A.OBSERVER.LAYOUT": "NLC"})
        batches = [torch.randn(4, 5, 6), torch.randn(2, 3, 6)]
        qmodel = calibrated(TwoLayers(), batches, config)
        quantizer = site(qmodel, "first.input")
        rows = torch.cat([batch.reshape(-1, 6) for batch in batches])
        expected, _ = qparams_from_range(rows.amin(0), rows.amax(0), quantizer.spec)
        assert torch.equal(quantizer.scale, expected)


class TestMemory:
    def test_no_activation_is_kept(self) -> None:
        """Between forwards there are no more tensors alive than before them, but for small statistics."""
        qmodel = QuantModel(Residual(), qconfig({"A.OBSERVER.TYPE": "mse"}))
        qmodel.prepare_calibration(keep_inputs=False)
        x, alive = torch.randn(2, 3, 16, 16), []  # other samples may have another level, which has its own statistic
        for _ in range(4):
            run(qmodel, [x.clone()])
            alive.append(live_bytes())
        assert max(alive) - alive[0] <= 0

    def test_inputs_are_kept_on_disk_beyond_a_little(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sparsebit.quantization.calibrating.runner._INPUT_BYTES", 1000)
        qmodel = QuantModel(TwoLayers(), qconfig())
        qmodel.prepare_calibration()
        run(qmodel, torch.randn(20, 8, 6))
        assert qmodel.calibration.runner is not None and qmodel.calibration.runner.inputs is not None
        store = qmodel.calibration.runner.inputs
        assert store.host_bytes <= 1000 and store.disk_bytes > 0
        folder = store._folder
        assert isinstance(folder, Path)
        qmodel.calc_qparams(asym=True)
        assert list(folder.iterdir()) == []

    def test_asym_store_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        high: list[int] = []
        put = SharedData.put

        def watched(self: SharedData, key: Any, value: Any) -> None:
            put(self, key, value)
            high.append(self.host_bytes)

        monkeypatch.setattr(SharedData, "put", watched)
        model, batches = Residual().eval(), torch.randn(6, 2, 3, 8, 8)
        qmodel = QuantModel(model, qconfig())
        qmodel.prepare_calibration(memory_budget=10_000)
        run(qmodel, batches)
        qmodel.calc_qparams(asym=True)
        assert 0 < max(high) <= 10_000
        free = calibrated(model, batches, asym=True)
        assert scales(qmodel) == scales(free)


def live_bytes() -> int:
    gc.collect()
    seen: dict[int, int] = {}
    for thing in gc.get_objects():
        # isinstance would ask things that warn; fakes hold nothing; other tests leave sparse tensors, without storage
        if type(thing) in (Tensor, nn.Parameter) and thing.layout is torch.strided:
            storage = thing.untyped_storage()
            if storage.data_ptr():  # tensors on the meta device, all at 0, hold nothing
                seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


class TestAsym:
    """Each layer is calibrated on truly quantized predecessors."""

    @pytest.mark.parametrize("make", [TwoLayers, Opaque], ids=["graph", "opaque"])
    @pytest.mark.parametrize(
        ("w_quant", "a_quant"),
        [(True, True), (True, False), (False, True), (False, False)],
        ids=["wa", "w", "a", "default"],
    )
    def test_two_layers_by_hand(self, make: type[nn.Module], w_quant: bool, a_quant: bool) -> None:
        model, batches = make(), torch.randn(3, 8, 6)
        qmodel = QuantModel(model, qconfig(bits=3))
        qmodel.prepare_calibration()
        run(qmodel, batches)
        qmodel.calc_qparams(asym=True, w_quant=w_quant, a_quant=a_quant)

        if not (w_quant or a_quant):
            w_quant = a_quant = True
        first, second = model.first, model.second
        x, weight = batches.reshape(-1, 6), first.weight
        weight = simulated(site(qmodel, "first.weight"), weight) if w_quant else weight
        x = simulated(site(qmodel, "first.input"), x) if a_quant else x
        hidden = F.linear(x, weight, first.bias)
        if make is TwoLayers:  # tanh is absorbed by the linear in front
            assert "tanh.input" not in sites(qmodel)
        hidden = torch.tanh(hidden)
        expected = qparams_from_range(hidden.min(), hidden.max(), site(qmodel, "second.input").spec)
        actual = site(qmodel, "second.input")
        torch.testing.assert_close((actual.scale, actual.zero_point), expected)
        assert second.weight.shape == (3, 8)

    def test_it_differs_from_the_plain_one(self) -> None:
        model, batches = TwoLayers(), torch.randn(3, 8, 6)
        plain, asym = (calibrated(model, batches, qconfig(bits=2), asym=asym) for asym in (False, True))
        assert site(plain, "first.input").scale == site(asym, "first.input").scale
        assert site(plain, "second.input").scale != site(asym, "second.input").scale

    def test_functional_weights_obey_w_quant(self) -> None:
        class Functional(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w, self.v = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(3, 4))

            def forward(self, x: Tensor) -> Tensor:
                return F.linear(F.linear(x, self.w), self.v)

        model, x = Functional(), torch.randn(8, 6)
        qmodel = QuantModel(model, qconfig(bits=3))
        qmodel.prepare_calibration()
        run(qmodel, [x])
        qmodel.calc_qparams(asym=True, a_quant=True)
        hidden = F.linear(simulated(site(qmodel, "linear.input"), x), model.w)
        expected, _ = qparams_from_range(hidden.min(), hidden.max(), site(qmodel, "linear_1.input").spec)
        torch.testing.assert_close(site(qmodel, "linear_1.input").scale, expected)

    def test_residual_network(self) -> None:
        config = qconfig({"A.QADD.ENABLE_QUANT": True})
        qmodel = calibrated(Residual().eval(), torch.randn(3, 2, 3, 8, 8), config, asym=True)
        assert all(quantizer.is_calibrated or quantizer.fake_fused for quantizer in qmodel.quantizers())

    def test_everything_is_off_afterwards(self) -> None:
        qmodel = QuantModel(TwoLayers(), qconfig())
        qmodel.prepare_calibration()
        run(qmodel, [torch.randn(4, 6)])
        qmodel.calc_qparams(asym=True)
        assert not any(quantizer.use_quant or quantizer.observing for quantizer in qmodel.quantizers())


class TestNeverObserved:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x: Tensor, which: bool = True) -> Tensor:
            if float(x.abs().max()) > 1e6:
                return self.unused(x)
            return self.used(x)

    def test_goes_off_and_is_reported(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, logger="sparsebit"):
            qmodel = calibrated(self.Half(), [torch.randn(4, 6)])
        assert "1 quantizers never saw a float tensor and stay off: unused.input" in caplog.text
        assert site(qmodel, "unused.input").fake_fused and site(qmodel, "unused.weight").is_enable
        assert "never saw a float tensor" in str(qmodel.coverage)

    def test_indices_and_masks_are_no_fault(self) -> None:
        class Gather(nn.Module):
            def forward(self, x: Tensor, mask: Tensor) -> Tensor:
                return x * mask

        qmodel = calibrated(Gather(), [(torch.randn(4, 6), torch.ones(4, 6, dtype=torch.bool))])
        assert sites(qmodel) == {"mul.input.0"}

    def test_another_calibration_may_find_it(self) -> None:
        qmodel = calibrated(self.Half(), [torch.randn(4, 6)])
        qmodel.prepare_calibration()
        run(qmodel, [torch.randn(4, 6), torch.full((2, 6), 1e7)])
        qmodel.calc_qparams()
        assert "unused.input" in sites(qmodel)
        assert "never saw" not in str(qmodel.coverage)

    @pytest.mark.parametrize("asym", [False, True], ids=["plain", "asym"])
    def test_reached_by_a_later_batch_alone(self, asym: bool) -> None:
        qmodel = calibrated(self.Half(), [torch.randn(4, 6), torch.full((2, 6), 1e7)], asym=asym)
        assert {"used.input", "unused.input"} <= sites(qmodel)


class Ranked(nn.Module):
    """Captured for matrices; everything else runs its own code."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 3:
            x = x.mean(1)
        return torch.sigmoid(self.fc(x)) * 2


def test_asym_without_a_batch_of_the_captured_form_is_an_error() -> None:
    qmodel = QuantModel(Ranked(), qconfig(), example_inputs=torch.randn(2, 4))
    qmodel.prepare_calibration()
    for _ in range(3):
        qmodel(torch.randn(2, 5, 4))
    with pytest.raises(CalibrationError, match=r"asym=True.*none of the 3 batches.*example_inputs"):
        qmodel.calc_qparams(asym=True)
    assert qmodel.coverage.float_layers == () or not any(q.was_unseen for q in qmodel.quantizers())


def test_calibration_that_shows_no_quantizer_anything_is_an_error() -> None:
    class Integers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) if x.is_floating_point() else x + 1

    qmodel = QuantModel(Integers(), qconfig(), example_inputs=torch.randn(2, 4))
    qmodel.prepare_calibration()
    qmodel(torch.ones(2, 4, dtype=torch.long))
    with pytest.raises(CalibrationError, match=r"none of the 1 activation quantizers saw a float tensor in 1 batches"):
        qmodel.calc_qparams()


def test_calibration_in_inference_mode_is_the_same() -> None:
    """Buffers that are inference tensors do not count writes: a batch norm's must not look written."""
    torch.manual_seed(0)
    model, x = Residual().eval(), torch.randn(4, 3, 8, 8)
    expected = calibrated(model, [x])
    with torch.inference_mode():
        qmodel = calibrated(model, [x])
        assert torch.equal(qmodel(x), expected(x))
    assert qmodel.coverage.num_weighted_quantized == 3 and qmodel.coverage.notes == expected.coverage.notes


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_infinite_inputs_of_a_layer_are_an_error(value: float) -> None:
    """One bad sample left the layer's input in float, with only a note."""
    x = torch.randn(8, 4)
    x[0, 0] = value
    with pytest.raises(CalibrationError, match=r"^0\.input: .*look into the calibration data"):
        calibrated(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), [x])


class Ensemble(nn.Module):
    """Calls its first layer with other weights than it has."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.layers, self.form = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), form
        self.layers[1].weight.data *= 8

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0]
        if self.form == "written":
            with torch.no_grad():
                first.weight.mul_(8)
                y: Tensor = first(x)
                first.weight.div_(8)
            return y
        if self.form == "swapped":
            first.weight.data, own = 8 * first.weight.data, first.weight.data
            y = first(x)
            first.weight.data = own
            return y
        if self.form == "scaled":
            weights = {name: 8 * parameter for name, parameter in first.named_parameters()}
            return torch.func.functional_call(first, weights, (x,))
        stacked, buffers = torch.func.stack_module_state(list(self.layers))
        if self.form == "parameters":
            return torch.vmap(lambda weights: torch.func.functional_call(first, weights, (x,)))(stacked)
        return torch.vmap(lambda *state: torch.func.functional_call(first, state, (x,)))(stacked, buffers)


class TestWeightsInThePlaceOfALayersOwn:
    @pytest.mark.parametrize("form", ["scaled", "parameters", "written", "swapped"])
    def test_their_ranges_are_observed(self, form: str) -> None:
        model, x = Ensemble(form), torch.randn(16, 4)
        qmodel = calibrated(model, [x], qconfig(bits=16))
        torch.testing.assert_close(qmodel(x), model(x), rtol=0, atol=1e-2)

    def test_a_later_calibration_begins_anew(self) -> None:
        model, x = Ensemble("scaled"), torch.randn(16, 4)
        qmodel = calibrated(model, [x], qconfig(bits=16))
        layer = next(module for module in qmodel.modules() if isinstance(module, WeightedQuantOpr))
        wide = layer.weight_quantizer.scale.clone()
        layer.op.weight.data /= 2
        qmodel.prepare_calibration()
        run(qmodel, [x])
        qmodel.calc_qparams()
        torch.testing.assert_close(layer.weight_quantizer.scale, wide / 2)

    def test_a_step_of_training_between_batches_is_none(self) -> None:
        model, x = TwoLayers(), torch.randn(4, 6)
        qmodel = QuantModel(model, qconfig())
        qmodel.prepare_calibration()
        layer = next(module for module in qmodel.modules() if isinstance(module, WeightedQuantOpr))
        for factor in (1.0, 0.5):
            with torch.no_grad():
                layer.op.weight.mul_(factor)
            run(qmodel, [x])
        qmodel.calc_qparams()
        low, high = layer.op.weight.detach().aminmax(dim=1)
        expected, _ = qparams_from_range(low, high, layer.weight_quantizer.spec)
        torch.testing.assert_close(layer.weight_quantizer.scale, expected)

    def test_numbers_of_layers_that_never_ran_are_refused(self) -> None:
        x = torch.randn(16, 4)
        qmodel = calibrated(Ensemble("state"), [x], qconfig(bits=16))
        with pytest.raises(
            CalibrationError, match=r"layers.0.input: torch.func calls this layer with the state of several"
        ):
            qmodel(x)


def test_samples_that_hardly_count_are_told(caplog: pytest.LogCaptureFixture) -> None:
    config = qconfig({"A.OBSERVER.TYPE": "mse"})
    images = torch.randn(100, 3, 6, 6)
    images[7] *= 100
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).eval()
    calibrated(model, [images], config)
    assert "sites more: 1 of 100 samples are far larger" in caplog.text
    caplog.clear()
    calibrated(model, [images[8:]], config)
    assert "far larger" not in caplog.text
