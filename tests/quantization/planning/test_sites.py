"""A plan is a value: what it says is what is built, and a changed one builds another model."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsebit.errors import BackendError, ConfigError
from sparsebit.numerics.spec import PerChannel, PerGroup, PerTensor, TensorSpec
from sparsebit.quantization import Plan, QuantModel, Site
from sparsebit.quantization.planning.sites import LEFT_OUT
from tests.quantization.tiny import Residual, qconfig, run

X = torch.randn(4, 3, 16, 16)


def plan_of(backend: str = "virtual", changes: dict[str, Any] | None = None) -> Plan:
    return QuantModel(Residual(), qconfig(changes, backend=backend)).plan


def calibrate(qmodel: QuantModel, batches: list[Tensor]) -> QuantModel:
    qmodel.prepare_calibration()
    run(qmodel, batches)
    qmodel.calc_qparams()
    qmodel.set_quant(w_quant=True, a_quant=True)
    return qmodel


def calibrated_by(plan: Plan, model: nn.Module | None = None) -> QuantModel:
    return calibrate(QuantModel(model or Residual(), plan=plan), [X])


class TestPlan:
    @pytest.mark.parametrize("backend", ["virtual", "onnxruntime", "openvino", "tensorrt"])
    def test_it_is_what_was_built(self, backend: str) -> None:
        qmodel = QuantModel(Residual(), qconfig(backend=backend))
        built = {q.name: (q.spec, q.TYPE, q.observer_name) for q in qmodel.quantizers() if not q.fake_fused}
        assert {name: (site.spec, site.quantizer, site.observer) for name, site in qmodel.plan.items()} == built
        assert {name: site.role for name, site in qmodel.plan.items()} == {
            name: name.removeprefix(f"{site.layer}.").split(".")[0] for name, site in qmodel.plan.items()
        }

    def test_it_is_printable(self) -> None:
        lines = str(plan_of()).splitlines()
        assert lines[0].split() == ["site", "format", "scale", "per", "quantizer", "observer"]
        assert any(line.split() == ["stem.conv.weight", "int8", "channel", "uniform", "minmax"] for line in lines)
        assert any("float: A.QADD.ENABLE_QUANT is off" in line for line in lines)

    @pytest.mark.parametrize("backend", ["virtual", "onnxruntime"])
    def test_json_and_back(self, backend: str) -> None:
        bits = {"virtual": 4, "onnxruntime": 8}[backend]
        plan = plan_of(backend).replace({"*.weight": {"bits": bits, "granularity": PerTensor()}})
        again = Plan.from_dict(json.loads(plan.to_json()))
        assert again.config == plan.config and again.floats == plan.floats
        assert plan.to_json().startswith('{\n "config": {\n  "')
        assert {n: s.to_dict() for n, s in again.items()} == {n: s.to_dict() for n, s in plan.items()}
        torch.manual_seed(0)
        left = calibrated_by(plan)
        torch.manual_seed(0)
        assert torch.equal(calibrated_by(again)(X), left(X))

    def test_options_are_in_the_json(self) -> None:
        """The ratio of a moving average only where it is not the default."""
        changes = {"A.OBSERVER.TYPE": "moving_average", "A.OBSERVER.MOVING_AVERAGE.EMA_RATIO": 0.5}
        plan = plan_of(changes=changes)
        values = plan.to_dict()["sites"]
        assert values["fc.input"]["ema_ratio"] == 0.5 and "ema_ratio" not in values["fc.weight"]
        assert values["fc.input"]["observer_options"] == {"EMA_RATIO": 0.5}
        again = Plan.from_dict(json.loads(plan.to_json()))["fc.input"]
        assert again.ema_ratio == 0.5 and again.observer_options == plan["fc.input"].observer_options

    def test_defaults_are_in_the_json_too(self) -> None:
        """A later version may have others."""
        plan = plan_of(changes={"A.OBSERVER.TYPE": "percentile"})
        assert plan.to_dict()["sites"]["fc.input"]["observer_options"] == {"ALPHA": 0.001}

    @pytest.mark.parametrize(
        ("scheme", "expected"), [("per-group-symmetric", PerGroup(1, 2)), ("per-channel-symmetric", PerChannel(0))]
    )
    def test_the_axes_of_scales(self, scheme: str, expected: PerGroup | PerChannel) -> None:
        changes = {"W.QSCHEME": scheme, "W.QUANTIZER.GROUP_SIZE": 2, "A.QSCHEME": "per-channel-affine"}
        plan = plan_of(changes={**changes, "A.SPECIFIC": [{"fc": ["OBSERVER.LAYOUT", "NLC"]}]})
        assert plan["fc.weight"].spec.granularity == expected
        assert plan["conv.input"].spec.granularity == PerChannel(1)
        assert plan["fc.input"].spec.granularity == PerChannel(-1)

    @pytest.mark.parametrize(
        ("scheme", "expected"), [("per-group-symmetric", PerGroup(0, 2)), ("per-channel-symmetric", PerChannel(1))]
    )
    def test_the_axes_of_a_transposed_convolution(self, scheme: str, expected: PerGroup | PerChannel) -> None:
        """Its weight is (inputs, outputs, ...)."""
        config = qconfig({"W.QSCHEME": scheme, "W.QUANTIZER.GROUP_SIZE": 2})
        plan = QuantModel(nn.Sequential(nn.ConvTranspose2d(4, 6, 3)), config).plan
        assert plan["0.weight"].spec.granularity == expected

    @pytest.mark.parametrize(
        ("values", "told"),
        [({"sites": {}}, "not a plan: config is missing"), ({"config": {}, "sites": {"a": {"bits": 8}}}, "not a site")],
    )
    def test_other_json_is_refused(self, values: dict[str, Any], told: str) -> None:
        with pytest.raises(ConfigError, match=told):
            Plan.from_dict(values)


class TestReplace:
    def test_gives_a_new_plan(self) -> None:
        plan = plan_of()
        changed = plan.replace({"stem.conv.weight": {"bits": 4}, "fc.*": {"observer": "MSE"}})
        assert plan["stem.conv.weight"].spec.bits == 8 and changed["stem.conv.weight"].spec.bits == 4
        assert [name for name, site in changed.items() if site.observer == "mse"] == ["fc.input", "fc.weight"]
        assert list(changed) == list(plan)

    def test_the_model_follows(self) -> None:
        plan = plan_of()
        site = Site("fc.weight", "weight", TensorSpec(3, True, PerChannel(0)), "lsq")
        qmodel = calibrated_by(plan.replace({"stem.conv.weight": {"bits": 2}, "fc.weight": site, "fc.input": None}))
        found = {q.name: q for q in qmodel.quantizers() if not q.fake_fused}
        assert found["stem.conv.weight"].spec.bits == 2 and found["conv.weight"].spec.bits == 8
        assert found["fc.weight"].TYPE == "lsq" and "fc.input" not in found
        assert qmodel.plan.floats["fc.input"] == LEFT_OUT
        assert torch.isfinite(qmodel(X)).all()

    def test_the_same_plan_builds_the_same_model(self) -> None:
        torch.manual_seed(0)
        model = Residual()
        first = calibrate(QuantModel(model, qconfig(backend="onnxruntime")), [X])
        second = calibrate(QuantModel(model, plan=first.plan), [X])
        assert torch.equal(first(X), second(X)) and second.plan == first.plan

    @pytest.mark.parametrize("name", ["relu.output", "stem.conv.input", "fc.input"])
    def test_any_site_may_be_left_out(self, name: str, tmp_path: Path) -> None:
        plan = plan_of("onnxruntime")
        names = [site for site in plan if name in site or site.endswith(name.rpartition(".")[2])]
        for one in names:
            qmodel = calibrated_by(plan.replace({one: None}))
            assert one not in {q.name for q in qmodel.quantizers() if not q.fake_fused}
            assert torch.isfinite(qmodel(X)).all()

    def test_bits_leave_a_narrow_grid(self) -> None:
        plan = plan_of("onnxruntime")
        assert (
            plan["stem.conv.weight"].spec.narrow and not plan.replace({"*": {"bits": 8}})["stem.conv.input"].spec.narrow
        )
        assert not plan_of().replace({"stem.conv.weight": {"bits": 4}})["stem.conv.weight"].spec.narrow
        assert plan.replace({"stem.conv.weight": {"symmetric": False}})["stem.conv.weight"].spec == TensorSpec(
            8, False, PerChannel(0)
        )

    @pytest.mark.parametrize(
        ("changes", "told"),
        [
            ({"conv9.weight": {"bits": 4}}, r"no site 'conv9\.weight'; near names: .*conv"),
            ({"stem.conv.weight": {"bit": 4}}, r"stem\.conv\.weight: a site has no 'bit'; allowed: bits, "),
            ({"stem.conv.weight": {"quantizer": "lqs"}}, r"unknown quantizer 'lqs'.*did you mean 'lsq'"),
            (
                {"stem.conv.weight": Site("fc.weight", "weight", TensorSpec(8, True))},
                r"its new site is called 'fc\.weight'",
            ),
        ],
    )
    def test_wrong_changes_are_told(self, changes: dict[str, Any], told: str) -> None:
        with pytest.raises(ConfigError, match=told):
            plan_of().replace(changes)

    def test_a_site_keeps_its_role(self) -> None:
        site = dataclasses.replace(plan_of()["fc.weight"], role="input")
        with pytest.raises(ConfigError, match=r"has 'fc\.weight' \(weight\), and its new site is called .* \(input\)"):
            plan_of().replace({"fc.weight": site})

    def test_the_format_is_the_quantizers(self) -> None:
        plan = plan_of().replace({"fc.weight": {"quantizer": "fp8"}})
        built = {q.name: q.spec for q in QuantModel(Residual(), plan=plan).quantizers()}
        assert built["fc.weight"] == plan["fc.weight"].spec and plan["fc.weight"].spec.format == "float8"
        assert plan.replace({"fc.weight": {"quantizer": "uniform"}})["fc.weight"].spec.format == "integer"

    def test_what_the_backend_cannot_run_is_refused(self) -> None:
        with pytest.raises(BackendError, match=r"4-bit .* at stem\.conv\.input: "):
            plan_of("tensorrt").replace({"stem.conv.input": {"bits": 4}})

    @pytest.mark.parametrize(
        ("backend", "site", "change", "key", "told"),
        [
            ("onnxruntime", "fc.weight", {"bits": 4}, {"W.QUANTIZER.BIT": 4}, "8-bit weights with 8-bit activations"),
            ("openvino", "fc.weight", {"bits": 4}, {"W.QUANTIZER.BIT": 4}, "8-bit weights with 8-bit activations"),
            ("tensorrt", "fc.weight", {"bits": 4}, {"W.QUANTIZER.BIT": 4}, "set 8, or A.QUANTIZER.DISABLE: true"),
            (
                "tensorrt",
                "fc.weight",
                {"granularity": PerTensor()},
                {"W.QSCHEME": "per-tensor-symmetric"},
                "8-bit per-channel-symmetric weights; set per-channel-symmetric",
            ),
            (
                "onnxruntime",
                "fc.weight",
                {"granularity": PerGroup(1, 2)},
                {"W.QSCHEME": "per-group-symmetric"},
                "8-bit weights with 8-bit activations",
            ),
            (
                "onnxruntime",
                "fc.weight",
                {"quantizer": "fp8"},
                {"W.QUANTIZER.TYPE": "fp8"},
                "fp8 weights with float activations only",
            ),
            (
                "onnxruntime",
                "stem.conv.input",
                {"granularity": PerChannel(1)},
                {"A.QSCHEME": "per-channel-affine"},
                "per-tensor activations",
            ),
            (
                "virtual",
                "fc.weight",
                {"quantizer": "fp8", "observer": "kl_histogram"},
                {"W.QUANTIZER.TYPE": "fp8", "W.OBSERVER.TYPE": "kl_histogram"},
                "even steps",
            ),
        ],
    )
    def test_what_the_config_refuses_is_refused(
        self, backend: str, site: str, change: dict[str, Any], key: dict[str, Any], told: str
    ) -> None:
        """With the same reason."""
        with pytest.raises(ConfigError, match=told):
            qconfig(key, backend=backend)
        with pytest.raises((BackendError, ConfigError), match=rf" at {site}: .*{told}"):
            plan_of(backend).replace({site: change})

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            ({"fc.input": {"quantizer": "dorefa"}}, "'dorefa' at fc.input: it is for weight tensors, not for an activ"),
            ({"fc.weight": {"quantizer": "pact"}}, "'pact' at fc.weight: it is for activation tensors, not for a w"),
            ({"fc.input": {"granularity": PerGroup(1, 4)}}, "8-bit per-group-affine at fc.input: .*per-channel-affine"),
        ],
    )
    def test_what_no_backend_runs(self, change: dict[str, Any], told: str) -> None:
        with pytest.raises(ConfigError, match=told):
            plan_of().replace(change)

    def test_bn_tuning_needs_weights_per_channel(self) -> None:
        plan = plan_of(changes={"SCHEDULE.BN_TUNING": True})
        with pytest.raises(ConfigError, match=r"per-tensor-symmetric at fc\.weight: BN tuning needs per-channel"):
            plan.replace({"fc.weight": {"granularity": PerTensor()}})

    @pytest.mark.parametrize("backend", ["onnxruntime", "openvino", "tensorrt"])
    def test_fewer_bits_beside_float_activations(self, backend: str) -> None:
        """In one call, in two, and where the config has left the activations float."""
        plan = plan_of(backend)
        both = plan.replace({"stem.conv.weight": {"bits": 4}, "stem.conv.input": None})
        later = plan.replace({"stem.conv.input": None}).replace({"stem.conv.weight": {"bits": 4}})
        by_config = plan_of(backend, {"A.SPECIFIC": [{"stem.conv": ["QUANTIZER.DISABLE", True]}]})
        for changed in (both, later, by_config.replace({"stem.conv.weight": {"bits": 4}})):
            assert changed["stem.conv.weight"].spec.bits == 4
            with pytest.raises(BackendError, match=r"4-bit .* at fc\.weight: "):
                changed.replace({"fc.weight": {"bits": 4}})
        floats = {name: None for name, site in plan.items() if site.role != "weight"}
        assert plan.replace({**floats, "fc.weight": {"bits": 4}})["fc.weight"].spec.bits == 4

    @pytest.mark.parametrize("backend", ["virtual", "onnxruntime", "openvino", "tensorrt"])
    def test_a_plan_may_be_replaced_by_itself(self, backend: str) -> None:
        plan = plan_of(backend)
        assert plan.replace(dict(plan)) == plan and plan.replace({"*": {}}) == plan


class TestBuilding:
    @pytest.mark.parametrize("given", [{}, {"config": "x", "plan": "y"}], ids=["neither", "both"])
    def test_one_of_config_and_plan(self, given: dict[str, str]) -> None:
        known: dict[str, Any] = {"config": qconfig(), "plan": plan_of()}
        with pytest.raises(ConfigError, match="give one of the two"):
            QuantModel(Residual(), **{name: known[name] for name in given})

    def test_a_plan_of_another_model(self) -> None:
        with pytest.raises(
            ConfigError, match=r"sites that this model has not: stem\.conv\.input.*make the plan from this"
        ):
            QuantModel(nn.Sequential(nn.Linear(3, 3)), plan=plan_of())

    @pytest.mark.parametrize("keep", ["folder", "deepcopy", "pickle"])
    def test_it_survives(self, keep: str, tmp_path: Path) -> None:
        torch.manual_seed(0)
        plan = plan_of("onnxruntime").replace({"stem.conv.weight": {"granularity": PerTensor()}, "fc.weight": None})
        qmodel = calibrated_by(plan)
        kept = {
            "folder": lambda: QuantModel.load(qmodel.save(tmp_path / "saved"), Residual()),
            "deepcopy": lambda: copy.deepcopy(qmodel),
            "pickle": lambda: pickle.loads(pickle.dumps(qmodel)),
        }[keep]()
        assert torch.equal(kept(X), qmodel(X))
        assert {q.name: q.spec for q in kept.quantizers()} == {q.name: q.spec for q in qmodel.quantizers()}

    def test_weights_that_no_op_owns(self) -> None:
        class Recurrent(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.lstm = nn.LSTM(4, 4, batch_first=True)

            def forward(self, x: Tensor) -> Tensor:
                return self.lstm(x)[0]  # type: ignore[no-any-return]

        x, model = torch.randn(2, 5, 4), Recurrent().eval()
        plan = QuantModel(model, qconfig(), example_inputs=x).plan
        assert {"lstm.weight_ih_l0", "lstm.weight_hh_l0"} <= plan.keys()
        changed = plan.replace({"lstm.weight_ih_l0": {"bits": 4}, "lstm.weight_hh_l0": None})
        qmodel = QuantModel(model, plan=changed, example_inputs=x)
        assert {q.name: q.spec.bits for q in qmodel.quantizers() if q.target == "weight" and not q.fake_fused} == {
            "lstm.weight_ih_l0": 4
        }
        qmodel.prepare_calibration()
        run(qmodel, [x])
        qmodel.calc_qparams()
