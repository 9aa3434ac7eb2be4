"""The ALGORITHMS of a config on a calibrated model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sparsebit
from sparsebit.errors import CalibrationError
from sparsebit.quantization import QuantModel, apply_algorithms, correct_biases, gptq, parse_qconfig, register_algorithm
from tests.quantization.tiny import prepared

DATA = [torch.linspace(-1, 1, 64).reshape(16, 4)]
BITS = {"DEVICE": "cpu", "W": {"QUANTIZER": {"BIT": 3}}, "A": {"QUANTIZER": {"BIT": 8}}}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).eval()


def config(*entries: Any) -> dict[str, Any]:
    return {**BITS, "ALGORITHMS": list(entries)}


def state(qmodel: QuantModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in qmodel.state_dict().items()}


def same(one: QuantModel, other: QuantModel) -> bool:
    return all(torch.equal(tensor, state(other)[name]) for name, tensor in state(one).items())


def test_equals_the_functions_called_in_that_order() -> None:
    by_config = sparsebit.quantize(model(), DATA, config({"gptq": {"SWEEPS": 1}}, "bias_correction"))
    by_hand = sparsebit.quantize(model(), DATA, BITS)
    gptq(by_hand, DATA, sweeps=1)
    correct_biases(by_hand, DATA)
    assert same(by_config, by_hand)
    assert by_config.applied_algorithms == by_hand.applied_algorithms == ("gptq", "bias_correction")


def test_results_by_name() -> None:
    qmodel = sparsebit.quantize(model(), DATA, BITS)
    qmodel.config = parse_qconfig(config("gptq"))
    ((name, result),) = apply_algorithms(qmodel, DATA)
    assert name == "gptq" and set(result) == {"0", "2"}


def test_an_iterator_is_refused_before_anything_is_done() -> None:
    with pytest.raises(CalibrationError, match=r"more than once.*list_iterator.*DataLoader"):
        sparsebit.quantize(model(), iter(DATA), config("gptq"))


def test_without_data() -> None:
    weights = {"W": {"QUANTIZER": {"BIT": 4}}, "A": {"QUANTIZER": {"DISABLE": True}}, "ALGORITHMS": ["gptq"]}
    with pytest.raises(CalibrationError, match=r"no calibration batches were given, and .*gptq.* need some"):
        sparsebit.quantize(model(), config=weights)


def test_a_killed_run_goes_on_in_the_algorithm_that_was_not_finished(tmp_path: Path) -> None:
    calls = []

    @register_algorithm("fails_once")
    def fails_once(qmodel: QuantModel, data: Any, *, resume: Any = None) -> None:
        calls.append(Path(resume).name)
        if len(calls) == 1:
            raise KeyboardInterrupt

    entries = config("gptq", "fails_once", "gptq")
    with pytest.raises(KeyboardInterrupt):
        sparsebit.quantize(model(), DATA, entries, resume=tmp_path)
    resumed = sparsebit.quantize(model(), DATA, entries, resume=tmp_path)
    assert calls == ["1-fails_once", "1-fails_once"]
    calls.append("no failure")
    assert same(resumed, sparsebit.quantize(model(), DATA, entries, resume=tmp_path / "other"))


def test_saved_and_loaded(tmp_path: Path) -> None:
    qmodel = sparsebit.quantize(model(), DATA, config("gptq"))
    qmodel.save(tmp_path / "saved")
    loaded = QuantModel.load(tmp_path / "saved", model())
    assert loaded.applied_algorithms == ("gptq",) and loaded.config == qmodel.config
    assert same(loaded, qmodel)


def test_export_warns_of_algorithms_that_were_not_run(tmp_path: Path) -> None:
    qmodel = prepared(model(), [DATA[0]], config("gptq"), example_inputs=DATA[0])
    qmodel.calc_qparams()
    with pytest.warns(UserWarning, match=r"not run on this model \(gptq\); call apply_algorithms"):
        qmodel.export_onnx(DATA[0], str(tmp_path / "a.onnx"))
    apply_algorithms(qmodel, DATA)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qmodel.export_onnx(DATA[0], str(tmp_path / "b.onnx"))
