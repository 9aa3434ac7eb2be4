from __future__ import annotations

import logging
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sparsebit.quantization import QuantModel, gptq
from tests.quantization import tiny

CONFIG = "{DEVICE: cpu, W: {QUANTIZER: {BIT: 3}}, A: {QUANTIZER: {BIT: 8}}}"
DATA = list(torch.rand(2, 16, 6, generator=torch.Generator().manual_seed(0)))


def float_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


def calibrated() -> QuantModel:
    return tiny.calibrated(float_model(), DATA, CONFIG, example_inputs=DATA[0])


def targets(qmodel: QuantModel) -> list[Tensor]:
    found: list[Tensor] = []
    qmodel.visit_blocks(DATA, lambda data: found.extend(value[0] for value in data.targets), blocks="network")
    return found


def revived(qmodel: QuantModel, how: str, folder: Path) -> QuantModel:
    if how == "saved":
        return QuantModel.load(qmodel.save(folder / "q"), float_model())
    again: QuantModel = pickle.loads(pickle.dumps(qmodel))
    return again


@pytest.mark.parametrize("how", ["saved", "pickled"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_model_without_its_float_values_says_so(
    how: str, times: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    qmodel = calibrated()
    gptq(qmodel, DATA)
    for _ in range(times):
        qmodel = revived(qmodel, how, tmp_path)
    with caplog.at_level(logging.WARNING):
        targets(qmodel)
    assert "the saved model does not contain the float model's values" in caplog.text


def test_a_loaded_model_whose_weights_are_as_they_were_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        again = revived(calibrated(), "saved", tmp_path)
        assert all(torch.equal(a, b) for a, b in zip(targets(again), targets(calibrated()), strict=True))
    assert not caplog.records


def test_a_copy_with_another_plan_is_compared_with_the_float_model_too() -> None:
    qmodel, expected = calibrated(), targets(calibrated())
    gptq(qmodel, DATA)
    copied = qmodel.with_plan(qmodel.plan)
    assert all(torch.equal(a, b) for a, b in zip(targets(copied), expected, strict=True))
    gptq(copied, DATA)  # of the copy alone
    assert all(torch.equal(a, b) for a, b in zip(targets(qmodel), expected, strict=True))


def test_a_layer_that_a_plan_leaves_out_has_the_float_model_s_parameters() -> None:
    qmodel, expected = calibrated(), calibrated()
    gptq(qmodel, DATA)
    sites = [site for site in qmodel.plan if site.endswith(".weight")]
    placed = qmodel.with_plan(qmodel.plan.replace(dict.fromkeys(sites[:1])))
    own = {name.replace(".op.", "."): value for name, value in placed.model.named_parameters()}
    layer = sites[0].removesuffix(".weight")
    with torch.no_grad():
        for name in ("weight", "bias"):
            assert torch.equal(own[f"{layer}.{name}"], expected.original.get_parameter(f"{layer}.{name}"))
        everything_float = qmodel.with_plan(qmodel.plan.replace(dict.fromkeys(qmodel.plan)))
        assert torch.allclose(everything_float(DATA[0]), expected.original(DATA[0]), atol=1e-6)


def test_another_format_begins_with_the_float_model_s_weight(caplog: pytest.LogCaptureFixture) -> None:
    qmodel, fresh = calibrated(), calibrated()
    site = next(site for site in qmodel.plan if site.endswith(".weight"))
    gptq(qmodel, DATA)
    caplog.clear()
    for model in (qmodel, fresh):
        model.replace_quantizer(site, {"bits": 8})
    assert "is the float model's again" in caplog.text
    assert torch.equal(qmodel.sites[site].scale, fresh.sites[site].scale)
    layer = site.removesuffix(".weight")
    weights = [model.model.get_submodule(layer).op.weight for model in (qmodel, fresh)]
    assert torch.equal(*weights)


def test_errors_after_an_algorithm_say_what_is_not_in_them(caplog: pytest.LogCaptureFixture) -> None:
    qmodel = calibrated()
    qmodel.profile(DATA[0])
    qmodel.get_quantization_error(DATA[0])
    assert not caplog.records
    gptq(qmodel, DATA)
    for verb in (qmodel.profile, qmodel.get_quantization_error):
        caplog.clear()
        verb(DATA[0])
        assert "algorithms have changed weights (gptq)" in caplog.text
