"""Efforts: names for ladders of algorithms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import sparsebit
from sparsebit.errors import ConfigError
from sparsebit.quantization import effort as effort_module
from sparsebit.quantization import parse_qconfig
from sparsebit.quantization.effort import LADDERS, with_effort

BITS = {"DEVICE": "cpu", "W": {"QUANTIZER": {"BIT": 4}}, "A": {"QUANTIZER": {"BIT": 8}}}


def test_none_and_fast_leave_the_config_as_it_is() -> None:
    config = parse_qconfig(BITS)
    assert with_effort(config, None) is config and with_effort(config, "fast") is config


@pytest.mark.parametrize("effort", ["good", "best"])
def test_ladders_are_sound_and_choose_ranges_by_mse(effort: Any) -> None:
    config = with_effort(parse_qconfig(BITS), effort)
    assert len(config.ALGORITHMS) == len(LADDERS[effort])
    assert (config.W.OBSERVER.TYPE, config.A.OBSERVER.TYPE) == ("mse", "mse")
    assert parse_qconfig(config.to_yaml()) == config


@pytest.mark.parametrize("effort", ["good", "best"])
def test_scales_are_searched_by_the_error_of_gptq(effort: Any) -> None:
    (step,) = (step for step in with_effort(parse_qconfig(BITS), effort).ALGORITHMS if step.name == "gptq")
    assert step.options.to_dict()["SCALE_SEARCH"] == "gptq"


def test_weights_of_8_bits_only_get_other_ranges() -> None:
    config = with_effort(parse_qconfig("onnxruntime"), "best")
    assert config.ALGORITHMS == () and config.W.OBSERVER.TYPE == "mse"


@pytest.mark.parametrize(("bits", "disable", "num"), [(4, False, 1), (4, True, 0), (8, False, 0)])
def test_layers_with_fewer_bits_than_the_others_count(bits: int, disable: bool, num: int) -> None:
    entry = {"head": ["QUANTIZER.BIT", bits, "QUANTIZER.DISABLE", disable]}
    config = {"DEVICE": "cpu", "W": {"QUANTIZER": {"BIT": 8}, "SPECIFIC": [entry]}, "A": {"QUANTIZER": {"BIT": 8}}}
    assert len(with_effort(parse_qconfig(config), "good").ALGORITHMS) == num


def test_few_bits_of_activations_alone_are_trained_without_gptq() -> None:
    config = parse_qconfig({"DEVICE": "cpu", "W": {"QUANTIZER": {"BIT": 8}}, "A": {"QUANTIZER": {"BIT": 4}}})
    assert [step.name for step in with_effort(config, "best").ALGORITHMS] == ["reconstruct"]
    assert with_effort(config, "good").ALGORITHMS == ()


def test_what_the_user_chose_stays() -> None:
    weights = {"QUANTIZER": {"BIT": 8, "TYPE": "fp8"}}
    activations = {"QUANTIZER": {"BIT": 8}, "OBSERVER": {"TYPE": "percentile"}}
    config = with_effort(parse_qconfig({"DEVICE": "cpu", "W": weights, "A": activations}), "good")
    assert (config.W.OBSERVER.TYPE, config.A.OBSERVER.TYPE) == ("minmax", "percentile")
    alone = {"DEVICE": "cpu", "W": {"QUANTIZER": {"BIT": 4}}, "A": {"QUANTIZER": {"DISABLE": True}}}
    assert with_effort(parse_qconfig(alone), "good").A.OBSERVER.TYPE == "minmax"


def test_refused() -> None:
    with pytest.raises(ConfigError, match="effort='most': allowed: fast, good, best"):
        with_effort(parse_qconfig(BITS), "most")
    with pytest.raises(ConfigError, match=r"the config has ALGORITHMS, too \(gptq\): give one of the two"):
        with_effort(parse_qconfig({**BITS, "ALGORITHMS": ["gptq"]}), "fast")


def test_more_effort_is_nearer_to_float() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))
    model.eval()
    images = torch.rand(4, 16, 3, 4, 4).repeat_interleave(2, -1).repeat_interleave(2, -2)
    data = list(images)
    errors = {}
    for effort in ("fast", "good"):
        qmodel = sparsebit.quantize(model, data, BITS, effort=effort)  # type: ignore[arg-type]
        with torch.no_grad():
            errors[effort] = sum(float((qmodel(x) - model(x)).square().mean()) for x in data)
    assert errors["good"] < 0.5 * errors["fast"]
    assert qmodel.applied_algorithms == ("gptq",)


def test_good_is_gptq_with_its_own_search() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    data = list(torch.randn(4, 32, 16) @ torch.randn(16, 16))
    found = sparsebit.quantize(model, data, BITS, effort="good")(data[0])
    ranges = {"OBSERVER": {"TYPE": "mse"}}
    config = {**BITS, "W": BITS["W"] | ranges, "A": BITS["A"] | ranges}  # type: ignore[operator]
    outputs = {}
    for search in ("nearest", "gptq"):
        steps = [{"gptq": {"SWEEPS": 0, "MAX_ROWS": 16384, "SCALE_SEARCH": search}}]
        outputs[search] = sparsebit.quantize(model, data, {**config, "ALGORITHMS": steps})(data[0])
    assert torch.equal(found, outputs["gptq"]) and not torch.equal(found, outputs["nearest"])


def test_best_continues_from_good_and_is_not_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On samples that neither has seen; with a rate at which nothing can be gained, it is exactly `good`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))
    model.eval()
    images = torch.rand(12, 16, 3, 4, 4).repeat_interleave(2, -1).repeat_interleave(2, -2)
    data, others = list(images[:8]), images[8:].flatten(0, 1)
    config = {"DEVICE": "cpu", "W": {"QUANTIZER": {"BIT": 3}}, "A": {"QUANTIZER": {"BIT": 4}}}

    def outputs(effort: Any) -> torch.Tensor:
        qmodel = sparsebit.quantize(model, data, config, effort=effort)
        assert qmodel.applied_algorithms == (("gptq",) if effort == "good" else ("gptq", "reconstruct"))
        with torch.no_grad():
            found: torch.Tensor = qmodel(others)
        return found

    with torch.no_grad():
        target = model(others)
    good = outputs("good")
    monkeypatch.setattr(effort_module, "_ON_CPU", {"BATCH_SIZE": 32, "STEPS": 150, "LR": 0.01})
    best = outputs("best")
    assert float((best - target).square().mean()) <= 1.05 * float((good - target).square().mean())
    monkeypatch.setattr(effort_module, "_ON_CPU", {"BATCH_SIZE": 32, "STEPS": 4, "LR": 20.0})
    assert torch.equal(outputs("best"), good)
