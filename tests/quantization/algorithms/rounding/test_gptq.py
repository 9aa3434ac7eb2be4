from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsebit.errors import CheckpointError, ConfigError
from sparsebit.numerics.reference import quantize as codes_of
from sparsebit.numerics.rounding import layer_matrix
from sparsebit.numerics.rounding.hessian import InputMoments
from sparsebit.quantization import QuantModel, gptq
from sparsebit.quantization.ops.quant_opr import WeightedQuantOpr
from tests.quantization import tiny

CONFIG = "{DEVICE: cpu, W: {QUANTIZER: {BIT: 3}}, A: {QUANTIZER: {BIT: 8}}}"


class Layers(nn.Module):
    """One of each kind of layer, a residual sum, and an input that two layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.grouped = nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=2)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2, groups=2)
        self.head = nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        y = torch.relu(self.depthwise(x))
        x = x + self.up(torch.relu(self.grouped(y)))
        return self.head(x.mean((2, 3)))


def float_model() -> nn.Module:
    torch.manual_seed(0)
    return Layers().eval()


def batches(count: int = 3, offset: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(offset)
    smooth = torch.rand(count, 8, 3, 4, 4, generator=generator).repeat_interleave(3, -1).repeat_interleave(3, -2)
    return list(smooth + 0.2 * torch.rand(count, 8, 3, 12, 12, generator=generator))


def calibrated(model: nn.Module, data: list[Tensor], config: Any = CONFIG) -> QuantModel:
    return tiny.calibrated(model, data, config, example_inputs=data[0])


def error(qmodel: QuantModel, model: nn.Module, data: list[Tensor]) -> float:
    with torch.no_grad():
        return float(sum((qmodel(x) - model(x)).square().mean() for x in data)) / len(data)


def weights(qmodel: QuantModel) -> dict[str, WeightedQuantOpr]:
    return {name: layer for name, layer in qmodel.model.named_modules() if isinstance(layer, WeightedQuantOpr)}


SCHEMES = {
    "channel": {"QSCHEME": "per-channel-symmetric"},
    "channel, affine": {"QSCHEME": "per-channel-affine"},
    "tensor": {"QSCHEME": "per-tensor-symmetric"},
    "tensor, affine": {"QSCHEME": "per-tensor-affine"},
    "group": {"QSCHEME": "per-group-symmetric", "QUANTIZER": {"BIT": 3, "GROUP_SIZE": 4}},
    "group, affine": {"QSCHEME": "per-group-affine", "QUANTIZER": {"BIT": 3, "GROUP_SIZE": 4}},
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_layer_and_scheme(scheme: str) -> None:
    model, data = float_model(), batches()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = {"DEVICE": "cpu", "W": {"QUANTIZER": {"BIT": 3}} | SCHEMES[scheme], "A": {"QUANTIZER": {"BIT": 8}}}
    qmodel = calibrated(model, data, config)
    nearest = error(qmodel, model, batches(2, offset=7))
    found = gptq(qmodel, data)
    assert list(found) == ["stem", "depthwise", "grouped", "up", "head"]
    assert all(gain.rounded <= gain.nearest for gain in found.values())
    assert error(qmodel, model, batches(2, offset=7)) < 0.5 * nearest  # on images that it has not seen
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    for name, layer in weights(qmodel).items():
        quantizer = layer.weight_quantizer
        kept = quantizer(layer.op.weight)
        assert torch.equal(kept, layer.op.weight), name  # nothing is left to round
        assert codes_of(layer.op.weight, *quantizer.qparams(), quantizer.spec).unique().numel() <= 8


@pytest.mark.parametrize("options", [
    {"act_order": False}, {"scale_search": "none"}, {"scale_search": "gptq"}, {"refit": False}, {"sweeps": 0},
    {"correct_bias": False}, {"input_correction": 0.0}, {"input_correction": 0.5, "damping": 0.1, "block_size": 5},
    {"keep_variance": True}, {"keep_variance": True, "input_correction": 0.0, "correct_bias": False},
    {"input_correction": 0.0, "correct_bias": False, "sweeps": 0, "refit": False, "scale_search": "none"},
], ids=lambda options: ", ".join(f"{name}={value}" for name, value in options.items()))  # fmt: skip
@pytest.mark.sample(4)
def test_every_option_works_alone(options: dict[str, Any]) -> None:
    model, data = float_model(), batches()
    qmodel = calibrated(model, data)
    nearest = error(qmodel, model, data)
    scales = {name: layer.weight_quantizer.scale.clone() for name, layer in weights(qmodel).items()}
    biases = {name: layer.op.bias.clone() for name, layer in weights(qmodel).items() if layer.op.bias is not None}
    gptq(qmodel, data, **options)
    assert error(qmodel, model, data) < nearest
    if options.get("scale_search") == "none" and options.get("refit") is False:
        assert all(torch.equal(weights(qmodel)[name].weight_quantizer.scale, scale) for name, scale in scales.items())
    if options.get("correct_bias") is False:
        assert all(torch.equal(weights(qmodel)[name].op.bias, bias) for name, bias in biases.items())


def test_a_float64_model_gains_as_much_as_a_float32_one() -> None:
    model, data = float_model(), batches()
    single, double = calibrated(model, data), calibrated(float_model().double(), [x.double() for x in data])
    gptq(single, data)
    gptq(double, [x.double() for x in data])
    for name, layer in weights(single).items():
        if layer.op.bias is not None:
            torch.testing.assert_close(weights(double)[name].op.bias.float(), layer.op.bias, rtol=0.05, atol=0.005)


def test_outputs_vary_as_much_as_in_the_float_model() -> None:
    model, data = float_model(), batches()
    qmodel = calibrated(model, data, "{DEVICE: cpu, W: {QUANTIZER: {BIT: 2}}, A: {QUANTIZER: {BIT: 8}}}")
    gptq(qmodel, data, keep_variance=True, max_rows=10**9)
    wanted: dict[str, Tensor] = {}
    found: dict[str, Tensor] = {}

    def kept_in(values: dict[str, list[Tensor]], name: str) -> Any:
        return lambda _module, _inputs, output: values.setdefault(name, []).append(output.transpose(0, 1).flatten(1))

    for values, root in ((wanted, model), (found, qmodel.model)):
        seen: dict[str, list[Tensor]] = {}
        hooks = [root.get_submodule(name).register_forward_hook(kept_in(seen, name)) for name in ("stem", "grouped")]
        with torch.no_grad():
            for x in data:
                (model if root is model else qmodel)(x)
        values |= {name: torch.cat(parts, 1).double() for name, parts in seen.items()}
        for hook in hooks:
            hook.remove()
    for name, outputs in wanted.items():
        torch.testing.assert_close(found[name].var(1), outputs.var(1), rtol=2e-3, atol=0.0)
        torch.testing.assert_close(found[name].mean(1), outputs.mean(1), rtol=1e-3, atol=1e-5)


def test_a_second_time_it_rounds_the_float_models_weights_again() -> None:
    model, data = float_model(), batches()
    qmodel = calibrated(model, data)
    gptq(qmodel, data, input_correction=1.0, scale_search="none", refit=False)
    first = {name: tensor.clone() for name, tensor in qmodel.state_dict().items()}
    gptq(qmodel, data, input_correction=1.0, scale_search="none", refit=False)
    for name, tensor in qmodel.state_dict().items():
        torch.testing.assert_close(tensor, first[name], msg=name)


def test_one_batch_is_halved_to_choose_the_correction() -> None:
    model, data = float_model(), [torch.cat(batches())]
    whole, parts = calibrated(model, data), calibrated(model, list(data[0].split(12)))
    for qmodel, given in ((whole, data), (parts, list(data[0].split(12)))):
        gptq(qmodel, given)
    states = (whole.state_dict(), parts.state_dict())
    assert all(torch.allclose(states[0][name], tensor, atol=1e-4) for name, tensor in states[1].items())


def test_a_few_far_larger_samples_do_not_decide_the_rounding() -> None:
    """Weights only: what the usual images lose, beside rounding for these alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)).eval()
    usual = batches(8)
    mixed = [*usual[:-1], torch.cat([usual[-1][:-1], 300 * torch.randn(1, 3, 12, 12)])]
    lost = {}
    for name, data in (("usual", usual), ("mixed", mixed)):
        qmodel = calibrated(model, data, "{DEVICE: cpu, W: {QUANTIZER: {BIT: 3}}, A: {QUANTIZER: {DISABLE: True}}}")
        gptq(qmodel, data)
        lost[name] = error(qmodel, model, usual)
    assert lost["mixed"] < 2 * lost["usual"]


def test_two_runs_have_equal_bits_and_survive_saving(tmp_path: Path) -> None:
    data = batches()
    states = []
    for seed in (1, 2):
        qmodel = calibrated(float_model(), data)
        torch.manual_seed(seed)
        gptq(qmodel, data)
        states.append(qmodel.state_dict())
    assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())
    qmodel.save(tmp_path / "saved")
    again = QuantModel.load(tmp_path / "saved", Layers())
    with torch.no_grad():
        assert torch.equal(again(data[0]), qmodel(data[0]))


@pytest.mark.slow
@pytest.mark.parametrize("stop_at", ["stem", "grouped", "head"])
def test_a_killed_run_goes_on_with_equal_bits(stop_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparsebit.quantization.algorithms.rounding import gptq as module

    data = batches()
    whole = calibrated(float_model(), data)
    gptq(whole, data)
    round_layer, rounded = module._round_layer, []

    def stopping(layer: Any, form: Any, data: Any, *more: Any) -> Any:
        if data.block.name == stop_at and not rounded:
            raise KeyboardInterrupt
        rounded.append(data.block.name) if rounded else None
        return round_layer(layer, form, data, *more)

    monkeypatch.setattr(module, "_round_layer", stopping)
    with pytest.raises(KeyboardInterrupt):
        gptq(calibrated(float_model(), data), data, resume=tmp_path)
    rounded.append("again")
    resumed = calibrated(float_model(), data)
    gptq(resumed, data, resume=tmp_path)
    assert rounded[1] == stop_at
    assert all(torch.equal(resumed.state_dict()[name], tensor) for name, tensor in whole.state_dict().items())
    # Another model is another run; other options have a folder of their own.
    gptq(calibrated(float_model(), data), data, resume=tmp_path, sweeps=0)
    with pytest.raises(CheckpointError, match="differ"):
        gptq(calibrated(float_model(), batches(offset=3)), data, resume=tmp_path)


@pytest.mark.parametrize(
    ("backend", "bits", "activations"),
    [("onnxruntime", 8, {"BIT": 8}), ("onnxruntime", 4, {"DISABLE": True}), ("virtual", 4, {"BIT": 8})],
)
def test_the_exported_file_computes_the_same(
    backend: str, bits: int, activations: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime")
    data = batches()
    config = {"BACKEND": backend, "DEVICE": "cpu", "W": {"QUANTIZER": {"BIT": bits}}, "A": {"QUANTIZER": activations}}
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU(), nn.Conv2d(8, 4, 1)
    ).eval()
    qmodel = calibrated(model, data, config)
    found = gptq(qmodel, data)
    assert len(found) == 3
    parity = qmodel.export_onnx(data[0], tmp_path / "m.onnx", check=data)
    assert parity is not None


def test_what_is_left_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body, self.head = nn.Embedding(10, 6), nn.Linear(6, 6), nn.Linear(6, 10, bias=False)
            self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
            self.two.weight = self.one.weight
            nn.utils.parametrizations.weight_norm(self.head)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.two(self.one(self.body(self.embed(tokens)))))

    torch.manual_seed(0)
    data = [torch.randint(10, (4, 5)) for _ in range(2)]
    qmodel = calibrated(Tied().eval(), data)
    tied = weights(qmodel)["one"].op.weight.clone()
    with caplog.at_level(logging.INFO):
        assert list(gptq(qmodel, data)) == ["body"]
    assert torch.equal(weights(qmodel)["one"].op.weight, tied)
    (told,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert "4 weights" in told and "embed: Embedding" in told and "one: its weight belongs to several" in told
    assert "head: its weight is computed" in told


def test_a_layer_that_is_called_twice_is_rounded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparsebit.quantization.algorithms.rounding import gptq as module

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(self.layer(torch.relu(self.layer(x)))))

    def made() -> QuantModel:
        torch.manual_seed(0)
        return calibrated(Twice().eval(), data)

    data = list(torch.randn(3, 16, 6, generator=torch.Generator().manual_seed(0)))
    qmodel = made()
    assert list(gptq(qmodel, data)) == ["layer", "head"]
    round_layer = module._round_layer

    def stopping(layer: Any, form: Any, data: Any, *more: Any) -> Any:
        if data.block.name == "head":
            raise KeyboardInterrupt
        return round_layer(layer, form, data, *more)

    with monkeypatch.context() as patched:
        patched.setattr(module, "_round_layer", stopping)
        with pytest.raises(KeyboardInterrupt):
            gptq(made(), data, resume=tmp_path)
    resumed = made()
    gptq(resumed, data, resume=tmp_path)
    assert all(torch.equal(resumed.state_dict()[name], tensor) for name, tensor in qmodel.state_dict().items())


def test_weights_that_are_float_stay(caplog: pytest.LogCaptureFixture) -> None:
    model, data = float_model(), batches()
    config = {
        "DEVICE": "cpu",
        "W": {"QUANTIZER": {"BIT": 3}, "SPECIFIC": [{"stem": ["QUANTIZER.DISABLE", True]}]},
        "A": {"QUANTIZER": {"BIT": 8}},
    }
    qmodel = calibrated(model, data, config)
    assert "stem" not in gptq(qmodel, data)
    assert "stem" not in caplog.text  # it was asked for
    assert torch.equal(weights(qmodel)["stem"].op.weight, model.get_submodule("stem").weight)


def test_weights_alone() -> None:
    model, data = float_model(), batches()
    config = {"DEVICE": "cpu", "W": {"QUANTIZER": {"BIT": 3}}, "A": {"QUANTIZER": {"DISABLE": True}}}
    qmodel = calibrated(model, data, config)
    nearest = error(qmodel, model, data)
    gptq(qmodel, data)
    assert error(qmodel, model, data) < 0.5 * nearest


def test_fewer_rows_are_nearly_as_good() -> None:
    model, data = float_model(), batches(8)
    nearest = error(calibrated(model, data), model, data)
    errors = []
    for max_rows in (None, 1 << 40, 300):
        qmodel = calibrated(model, data)
        gptq(qmodel, data, max_rows=max_rows)
        errors.append(error(qmodel, model, data))
    assert errors[0] == errors[1] != errors[2]
    assert errors[2] < 0.6 * nearest


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale_search": "fast"}, "allowed: none, nearest, gptq"),
        ({"input_correction": 1.5}, "input_correction=1.5: allowed: a number, at least 0, at most 1"),
        ({"damping": -1}, "damping=-1: .* at least 0"),
        ({"sweeps": -1}, "sweeps=-1: .* at least 0"),
        ({"block_size": 0}, "block_size=0: .* at least 1"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    data = batches(1)
    with pytest.raises(ConfigError, match=message):
        gptq(calibrated(float_model(), data), data, **options)


class Hidden(nn.Module):
    """A weight that a function reads (it becomes a layer), and a layer that code calls which cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.weight = nn.Linear(8, 8), Untraceable(), nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.inner(self.first(x)), self.weight)


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if float(x.sum()) < 1e9 else x  # type: ignore[no-any-return]


def test_weights_that_no_visit_sees_are_told(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    data = [torch.randn(16, 8)]
    qmodel = calibrated(Hidden().eval(), data)
    with caplog.at_level(logging.WARNING):
        found = gptq(qmodel, data)
    assert list(found) == ["first", "linear"]
    (told,) = [record.message for record in caplog.records if "GPTQ left" in record.message]
    assert "left 1 weights" in told and "inner.layer.weight" in told and "untraced code" in told


def test_few_rows_are_told(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 8)).eval()
    for rows, told in ((1, "(0 has 0.031)"), (64, "(0 has 2)"), (512, "")):
        caplog.clear()
        data = [torch.randn(rows, 32)]
        qmodel = calibrated(model, data)
        with caplog.at_level(logging.WARNING):
            gptq(qmodel, data)
        assert ("fewer than 4 rows" in caplog.text) == bool(told) and told in caplog.text


def test_weights_are_not_fitted_to_few_rows() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32)).eval()
    mix = torch.randn(64, 64) * torch.logspace(0, -1, 64)
    few, others = [torch.randn(8, 64) @ mix.T for _ in range(4)], [torch.randn(2000, 64) @ mix.T]
    errors = {}
    for damping in (0.01, "auto"):
        qmodel = calibrated(model, few)
        gptq(qmodel, few, damping=damping)
        errors[damping] = error(qmodel, model, others)
    assert errors["auto"] < 0.9 * errors[0.01]


KILLED = """
import importlib, os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)  # as here: sums of several threads have other last bits
from tests.quantization.algorithms.rounding.test_gptq import batches, calibrated, float_model

module = importlib.import_module("sparsebit.quantization.algorithms.rounding.gptq")
store_codes = module.store_codes

def dying(quantizer, weight, *args):
    store_codes(quantizer, weight, *args)  # the layer is changed, and not yet finished
    if tuple(weight.shape) == (8, 4, 3, 3):
        os.kill(os.getpid(), signal.SIGKILL)

module.store_codes = dying
data = batches()
module.gptq(calibrated(float_model(), data), data, resume=Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_with_equal_bits(tmp_path: Path, project_root: Path) -> None:
    script, folder, data = tmp_path / "killed.py", tmp_path / "kept", batches()
    script.write_text(KILLED)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(project_root), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(script), str(folder)]
    assert subprocess.run(command, env=environment, timeout=240).returncode == -signal.SIGKILL
    assert any(folder.rglob("*"))
    whole, resumed = calibrated(float_model(), data), calibrated(float_model(), data)
    gptq(whole, data)
    gptq(resumed, data, resume=folder)
    assert all(torch.equal(resumed.state_dict()[name], tensor) for name, tensor in whole.state_dict().items())


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 36, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.conv(x))[:, :, ::2, ::2].flatten(1))


@pytest.mark.parametrize("scheme", ["per-channel-symmetric", "per-tensor-affine", "per-group-symmetric"])
def test_a_very_wide_layer_is_rounded_in_parts(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second moments would take gigabytes: those of the 25,088 inputs of VGG's first linear layer take five."""
    torch.manual_seed(0)
    model, data = Wide().eval(), batches(8)
    size = ", GROUP_SIZE: 32" if "group" in scheme else ""
    config = f"{{DEVICE: cpu, W: {{QSCHEME: {scheme}, QUANTIZER: {{BIT: 3{size}}}}}, A: {{QUANTIZER: {{BIT: 8}}}}}}"
    nearest = calibrated(model, data, config)
    monkeypatch.setattr(layer_matrix, "_MOST_MOMENTS", 96**2)
    largest = 0
    hessian = InputMoments.hessian

    def noted(self: InputMoments, *, centered: bool = False) -> Tensor:
        nonlocal largest
        found = hessian(self, centered=centered)
        largest = max(largest, found.numel())
        return found

    monkeypatch.setattr(InputMoments, "hessian", noted)
    qmodel = calibrated(model, data, config)
    found = gptq(qmodel, data)
    assert largest <= 96**2
    assert found["head"].rounded < found["head"].nearest
    others = batches(4, offset=1)
    assert error(qmodel, model, others) < 0.8 * error(nearest, model, others)
