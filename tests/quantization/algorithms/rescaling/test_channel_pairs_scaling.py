from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparsebit.quantization import QuantModel, correct_biases, equalize, gptq, reconstruct, smooth
from sparsebit.quantization.algorithms.rescaling import channel_pairs_scaling
from sparsebit.quantization.algorithms.rescaling.channel_pairs_limits import SeenValues
from sparsebit.quantization.algorithms.rescaling.channel_pairs_scaling import FloatRuns, float_runs
from tests.quantization import tiny

DATA = list(torch.randn(3, 16, 6, generator=torch.Generator().manual_seed(0)))
SCALING: dict[str, Callable[..., Any]] = {"equalize": equalize, "smooth": smooth}
CHANGING: dict[str, Callable[[QuantModel], Any]] = {
    "gptq": lambda qmodel: gptq(qmodel, DATA),
    "reconstruct": lambda qmodel: reconstruct(qmodel, DATA, steps=3, learn_biases=True),
    "bias correction": lambda qmodel: correct_biases(qmodel, DATA),
}


def float_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    with torch.no_grad():
        model[0].weight[::3] *= 20
    return model


def calibrated() -> QuantModel:
    return tiny.calibrated(float_model(), DATA, tiny.qconfig(bits=3), example_inputs=DATA[0])


@pytest.mark.sample(2)
@pytest.mark.parametrize("before", CHANGING)
@pytest.mark.parametrize("scaling", SCALING)
def test_it_starts_from_the_float_model_after_other_algorithms(
    scaling: str, before: str, caplog: pytest.LogCaptureFixture
) -> None:
    alone, qmodel = calibrated(), calibrated()
    SCALING[scaling](alone, DATA)
    CHANGING[before](qmodel)
    with caplog.at_level(logging.WARNING):
        SCALING[scaling](qmodel, DATA)
    assert f"Call {scaling}() first" in caplog.text
    expected = alone.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in qmodel.state_dict().items())
    gptq(alone, DATA)
    gptq(qmodel, DATA)  # compares with the smoothed float model
    expected = alone.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in qmodel.state_dict().items())


@pytest.mark.parametrize("scaling", SCALING)
def test_after_loading_it_says_that_weights_are_rounded_twice(
    scaling: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    qmodel = calibrated()
    gptq(qmodel, DATA)
    loaded = QuantModel.load(qmodel.save(tmp_path / "q"), float_model())
    loaded.set_quant(w_quant=True, a_quant=True)
    with caplog.at_level(logging.WARNING):
        SCALING[scaling](loaded, DATA)
    assert "rounded a second time" in caplog.text


@pytest.mark.parametrize("scaling", SCALING)
def test_the_first_of_the_algorithms_says_nothing(scaling: str, caplog: pytest.LogCaptureFixture) -> None:
    qmodel = calibrated()
    with caplog.at_level(logging.WARNING):
        SCALING[scaling](qmodel, DATA)
    assert not caplog.records


@pytest.mark.parametrize("scaling", SCALING)
def test_an_error_leaves_what_other_algorithms_did(scaling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    qmodel = calibrated()
    gptq(qmodel, DATA)
    before = {name: tensor.clone() for name, tensor in qmodel.state_dict().items()}

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no more disk")

    monkeypatch.setattr(channel_pairs_scaling.FloatRuns, "calibrate_again", fail)
    with pytest.raises(RuntimeError, match="no more disk"):
        SCALING[scaling](qmodel, DATA)
    assert all(torch.equal(tensor, before[name]) for name, tensor in qmodel.state_dict().items())
    assert len(qmodel.float_parameters) > 0


@pytest.mark.parametrize("scaling", SCALING)
def test_float_outputs_are_compared_in_full_float32(scaling: str) -> None:
    seen: set[tuple[bool, bool]] = set()
    qmodel = calibrated()
    assert torch.backends.cudnn.allow_tf32  # torch's default

    def note(*_: Any) -> None:
        seen.add((qmodel.is_quantized("weight"), torch.backends.cudnn.allow_tf32))

    class Comparing(FloatRuns):
        def changed(self) -> str | None:
            seen.clear()
            with qmodel.model.register_forward_hook(note):
                return super().changed()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel_pairs_scaling, "FloatRuns", Comparing)
        SCALING[scaling](qmodel, DATA)
    assert seen == {(False, False)}
    assert torch.backends.cudnn.allow_tf32


def test_held_out_samples_are_hidden_from_what_is_learned() -> None:
    with float_runs(calibrated(), DATA, verb="equalize", asym=False, memory_budget=1 << 20) as runs:
        (pair, *_) = pairs = runs.pairs()
        watches = [SeenValues((), readers_of=pairs) for _ in range(2)]
        runs.observe(*watches)
        every, learned = (watch.inputs(pair) for watch in watches)
        assert every is not None and learned is not None
        assert (every.count, learned.count) == (48, 40)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("scaling", SCALING)
def test_pairs_of_convolutions_are_kept(scaling: str, device: str, caplog: pytest.LogCaptureFixture) -> None:
    """On a GPU cuDNN rounds the inputs of convolutions to 11 bits, unless it is told not to."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU()]
    for _ in range(6):
        layers += [nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5)).eval()
    with torch.no_grad():
        for layer in layers[:-2:2]:
            layer.get_parameter("weight")[::3] *= 20
    batches = list(torch.randn(2, 16, 3, 16, 16, device=device))
    config = tiny.qconfig({"DEVICE": device}, bits=4)
    qmodel = tiny.calibrated(model.to(device), batches, config, example_inputs=batches[0])
    assert torch.backends.cudnn.allow_tf32  # torch's default
    found = SCALING[scaling](qmodel, batches)
    assert "is undone" not in caplog.text
    assert any(result.num_scaled for result in found.values())
