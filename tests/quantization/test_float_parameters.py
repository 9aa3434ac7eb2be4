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
    assert "the float model's values are not in what was saved" in caplog.text


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
