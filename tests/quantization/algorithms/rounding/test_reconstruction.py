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

import sparsebit
from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.execution.blocks.captured_step import CapturedStep
from sparsebit.execution.held_out import HoldOut
from sparsebit.numerics.reference import quantize as codes_of
from sparsebit.quantization import BlockReconstruction, QuantModel, gptq, reconstruct
from sparsebit.quantization.algorithms.rounding import reconstruction
from sparsebit.quantization.algorithms.rounding.reconstruction import METHODS, Method
from sparsebit.quantization.ops.quant_opr import WeightedQuantOpr
from tests.parameters import first_fast
from tests.quantization import tiny

CONFIG = "{DEVICE: cpu, W: {QUANTIZER: {BIT: 3}}, A: {QUANTIZER: {BIT: 4}}}"
QUICK: dict[str, Any] = {"steps": 40, "batch_size": 16}


class Layers(nn.Module):
    """A residual block with a depthwise convolution, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.point = nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = torch.relu(x + self.point(torch.relu(self.depthwise(x))))
        return self.head(x.mean((2, 3)))


def float_model() -> nn.Module:
    torch.manual_seed(0)
    return Layers().eval()


def batches(count: int = 3, offset: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(offset)
    smooth = torch.rand(count, 16, 3, 4, 4, generator=generator).repeat_interleave(2, -1).repeat_interleave(2, -2)
    return list(smooth + 0.2 * torch.rand(count, 16, 3, 8, 8, generator=generator))


def calibrated(model: nn.Module, data: list[Tensor], config: Any = CONFIG) -> QuantModel:
    return tiny.calibrated(model, data, config, example_inputs=data[0])


def error(qmodel: QuantModel, model: nn.Module, data: list[Tensor]) -> float:
    with torch.no_grad():
        return float(sum((qmodel(x) - model(x)).square().mean() for x in data)) / len(data)


def weights(qmodel: QuantModel) -> dict[str, WeightedQuantOpr]:
    return {name: layer for name, layer in qmodel.model.named_modules() if isinstance(layer, WeightedQuantOpr)}


def codes(qmodel: QuantModel) -> dict[str, Tensor]:
    found = {}
    for name, layer in weights(qmodel).items():
        quantizer = layer.weight_quantizer
        found[name] = codes_of(layer.op.get_parameter("weight").detach(), *quantizer.qparams(), quantizer.spec)
    return found


def gain(found: dict[str, BlockReconstruction]) -> float:
    """What is left of the blocks' errors, all together. That of the network need not follow in so small a one."""
    return sum(result.after for result in found.values()) / sum(result.before for result in found.values())


def check_weights_hold_their_values(qmodel: QuantModel) -> None:
    """A weight is as it was, or it has the values of its codes."""
    for name, layer in weights(qmodel).items():
        weight = layer.op.get_parameter("weight")
        if qmodel.float_parameters.get(f"{name}.op.weight") is not None:
            assert torch.equal(layer.weight_quantizer(weight), weight)
        assert "forward" not in layer.weight_quantizer.__dict__
        assert "forward" not in layer.input_quantizer.__dict__


@pytest.mark.sample(2)
@pytest.mark.parametrize("method", list(METHODS))
def test_every_method_makes_the_blocks_better(method: Method) -> None:
    model, data = float_model(), batches()
    qmodel = calibrated(model, data)
    start = codes(qmodel)
    found = reconstruct(qmodel, data, method=method, **QUICK)
    assert gain(found) < 0.95
    check_weights_hold_their_values(qmodel)
    changed = {name for name, own in codes(qmodel).items() if not torch.equal(own, start[name])}
    assert changed and sum(result.num_changed for result in found.values()) > 0
    per_layer = {"stem", "depthwise", "point", "head"}
    assert set(found) == per_layer if method == "adaround" else len(found) == (1 if method == "distill" else 3)
    with torch.no_grad():
        assert all(p.grad is None for p in qmodel.parameters())


SCHEMES = ["per-group-symmetric", "per-channel-symmetric", "per-channel-affine", "per-tensor-affine"]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("method", "scheme"),
    [*(("brecq", scheme) for scheme in SCHEMES), *first_fast(("autoround", scheme) for scheme in SCHEMES)],
)
def test_every_grid(method: Method, scheme: str) -> None:
    model, data = float_model(), batches()
    bits = {"BIT": 3, "GROUP_SIZE": 4} if "group" in scheme else {"BIT": 3}
    activation = "per-tensor-symmetric" if "symmetric" in scheme else "per-tensor-affine"
    config = {
        "DEVICE": "cpu",
        "W": {"QSCHEME": scheme, "QUANTIZER": bits},
        "A": {"QSCHEME": activation, "QUANTIZER": {"BIT": 6}},
    }
    qmodel = calibrated(model, data, config)
    assert gain(reconstruct(qmodel, data, method=method, **QUICK)) < 1
    check_weights_hold_their_values(qmodel)


@pytest.mark.parametrize("rounding", ["sigmoid", "sign", "latent"])
def test_it_begins_with_the_codes_of_gptq(rounding: Any) -> None:
    """With a rate of 0 nothing moves: the codes are GPTQ's, though the float weights are still known."""
    model, data = float_model(), batches()
    qmodel = calibrated(model, data)
    gptq(qmodel, data)
    start = codes(qmodel)
    options: dict[str, Any] = {"rounding": rounding, "lr": 0.0, "scale_lr": 0.0, "penalty": 0.0}
    reconstruct(qmodel, data, method="qdrop", **options, **QUICK)
    assert all(torch.equal(own, start[name]) for name, own in codes(qmodel).items())


@pytest.mark.parametrize("scheme", ["per-channel-symmetric", "per-channel-affine", "per-group-symmetric"])
def test_latent_weights_take_any_code(scheme: str) -> None:
    """Of the whole network, with scales: its error falls, and some codes are not next to the float weight's."""
    model, data = float_model(), batches()
    bits = {"BIT": 3, "GROUP_SIZE": 4} if "group" in scheme else {"BIT": 3}
    config = {"DEVICE": "cpu", "W": {"QSCHEME": scheme, "QUANTIZER": bits}, "A": {"QUANTIZER": {"BIT": 6}}}
    qmodel = calibrated(model, data, config)
    start, before = codes(qmodel), error(qmodel, model, data)
    found = reconstruct(qmodel, data, method="distill", lr=0.15, **QUICK)
    assert found["network"].is_kept and error(qmodel, model, data) < 0.8 * before
    check_weights_hold_their_values(qmodel)
    farthest = max(float((own - start[name]).abs().max()) for name, own in codes(qmodel).items())
    assert farthest >= (1 if "group" in scheme else 2)


def test_views_are_learned_from() -> None:
    """Of learned and of held-out samples alike; the float model gives the targets of all."""
    data = batches()
    qmodel = calibrated(float_model(), data)
    seen: list[tuple[int, int]] = []

    def visit(block: Any) -> None:
        seen.append((sum(len(x) for (x,) in block.inputs), sum(len(x) for (x,) in block.held_out.inputs)))
        with torch.no_grad():
            torch.testing.assert_close([t for (t,) in block.targets], [float_model()(x) for (x,) in block.inputs])

    qmodel.visit_blocks(data, visit, blocks="network", hold_out=HoldOut(0.25), views=3)
    assert seen == [(36 * 3, 12 * 3)]
    reconstruct(qmodel, data, method="distill", views=2, **QUICK)
    check_weights_hold_their_values(qmodel)


def test_views_of_what_is_no_image(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    data = [torch.rand(16, 8)]
    qmodel = calibrated(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).eval(), data)
    with caplog.at_level(logging.INFO):
        reconstruct(qmodel, data, views=4, **QUICK)
    assert "the input is not one batch of images" in caplog.text


def test_targets_are_those_of_the_float_model_after_other_algorithms() -> None:
    model, data = float_model(), batches()
    qmodel = calibrated(model, data)
    gptq(qmodel, data)
    reconstruct(qmodel, data, method="autoround", **QUICK)
    last: list[Tensor] = []

    def visit(block: Any) -> None:
        last[:] = [values[0] for values in block.targets]

    qmodel.visit_blocks(data, visit)
    with torch.no_grad():
        torch.testing.assert_close(last, [model(x) for x in data])


def test_the_whole_network_at_last() -> None:
    model, data = float_model(), batches()
    qmodel = calibrated(model, data)
    reconstruct(qmodel, data, **QUICK)
    before, start = error(qmodel, model, data), codes(qmodel)
    options: dict[str, Any] = {"learn_step_sizes": True, "learn_weight_scales": True, "learn_biases": True}
    found = reconstruct(qmodel, data, blocks="network", rounding="none", drop=0.0, **options, **QUICK)
    assert list(found) == ["network"] and error(qmodel, model, data) < before
    check_weights_hold_their_values(qmodel)
    assert all(torch.equal(own, start[name]) for name, own in codes(qmodel).items())


def test_activations_alone() -> None:
    model, data = float_model(), batches()
    config = {"DEVICE": "cpu", "W": {"QUANTIZER": {"DISABLE": True}}, "A": {"QUANTIZER": {"BIT": 3}}}
    qmodel = calibrated(model, data, config)
    before = error(qmodel, model, data)
    found = reconstruct(qmodel, data, method="brecq", scale_lr=0.01, **QUICK)
    assert gain(found) < 1 and error(qmodel, model, data) < before
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            path, _, own = name.rpartition(".")
            assert torch.equal(getattr(qmodel.model.get_submodule(path), own), parameter)


def test_nothing_to_learn_is_nothing_done() -> None:
    model, data = float_model(), batches()
    config = {"DEVICE": "cpu", "W": {"QUANTIZER": {"DISABLE": True}}, "A": {"QUANTIZER": {"BIT": 8}}}
    assert reconstruct(calibrated(model, data, config), data, method="autoround", **QUICK) == {}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["qdrop", "brecq", "distill"])
def test_two_runs_have_equal_bits_and_survive_saving(method: Method, tmp_path: Path) -> None:
    data = batches()
    states = []
    for seed in (1, 2):
        qmodel = calibrated(float_model(), data)
        torch.manual_seed(seed)
        reconstruct(qmodel, data, method=method, float_share=0.5, **QUICK)
        states.append(qmodel.state_dict())
    assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())
    qmodel.save(tmp_path / "saved")
    again = QuantModel.load(tmp_path / "saved", Layers())
    with torch.no_grad():
        assert torch.equal(again(data[0]), qmodel(data[0]))


def test_memory_is_bounded_and_the_disk_gives_equal_bits() -> None:
    data = batches()
    states = []
    for budget in (1 << 30, 0):
        qmodel = calibrated(float_model(), data)
        reconstruct(qmodel, data, method="brecq", memory_budget=budget, steps=20, batch_size=16)
        states.append(qmodel.state_dict())
    assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())


def all_algorithms(folder: Path | None) -> QuantModel:
    data = batches(2)
    qmodel = calibrated(float_model(), data)
    gptq(qmodel, data, resume=folder)
    options: dict[str, Any] = {"batch_size": 16, "resume": folder}
    reconstruct(qmodel, data, method="brecq", drop=0.5, steps=10, **options)
    reconstruct(qmodel, data, method="distill", steps=5, views=2, **options)
    return qmodel


def dying(train: Any, last: str) -> Any:
    """The training of a block, which kills the process when it comes to this one."""

    def training(data: Any, *args: Any, **kwargs: Any) -> Any:
        if data.block.name == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return train(data, *args, **kwargs)

    return training


SCRIPT = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)  # as here: sums of several threads have other last bits
from sparsebit.quantization.algorithms.rounding import reconstruction
from tests.quantization.algorithms.rounding.test_reconstruction import all_algorithms, dying

reconstruction.train_block = dying(reconstruction.train_block, sys.argv[2])
all_algorithms(Path(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("last", ["head", "network"])
def test_a_killed_run_goes_on_and_ends_with_equal_bits(
    last: str, tmp_path: Path, project_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, folder = tmp_path / "killed.py", tmp_path / "kept"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(project_root), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(script), str(folder), last]
    assert subprocess.run(command, env=environment, timeout=240).returncode == -signal.SIGKILL
    trained: list[str] = []
    train = reconstruction.train_block

    def counting(data: Any, *args: Any, **kwargs: Any) -> Any:
        trained.append(data.block.name)
        return train(data, *args, **kwargs)

    whole = all_algorithms(None).state_dict()
    monkeypatch.setattr(reconstruction, "train_block", counting)
    resumed = all_algorithms(folder).state_dict()
    assert trained == {"head": ["head", "network"], "network": ["network"]}[last]
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "bits", "activations"), [("onnxruntime", 8, {"BIT": 8}), ("virtual", 4, {"BIT": 4})]
)
def test_the_exported_file_computes_the_same(
    backend: str, bits: int, activations: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime")
    model, data = float_model(), batches()
    config = {"BACKEND": backend, "DEVICE": "cpu", "W": {"QUANTIZER": {"BIT": bits}}, "A": {"QUANTIZER": activations}}
    qmodel = calibrated(model, data, config)
    assert gain(reconstruct(qmodel, data, method="qdrop", learn_biases=True, **QUICK)) < 1
    reconstruct(qmodel, data, method="distill", **QUICK)
    assert qmodel.export_onnx(data[0], tmp_path / "m.onnx", check=data) is not None


def test_what_is_left_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.relu(self.one(torch.relu(self.body(x)))))

    torch.manual_seed(0)
    data = [torch.randn(8, 6) for _ in range(2)]
    qmodel = calibrated(Tied().eval(), data)
    tied = weights(qmodel)["one"].op.get_parameter("weight").clone()
    with caplog.at_level(logging.INFO):
        assert "body" in reconstruct(qmodel, data, method="autoround", **QUICK)
    assert torch.equal(weights(qmodel)["one"].op.get_parameter("weight"), tied)
    (told,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert "2 weights" in told and "one: its weight belongs to several" in told


def test_a_named_block_with_nothing_to_learn_is_told(caplog: pytest.LogCaptureFixture) -> None:
    data = [torch.randn(8, 6) for _ in range(2)]
    qmodel = calibrated(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)).eval(), data)
    assert list(reconstruct(qmodel, data, blocks=("0", "1"), **QUICK)) == ["0"]
    assert "nothing can be learned in 1" in caplog.text


def test_a_layer_that_is_called_twice_is_learned_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(self.layer(torch.relu(self.layer(x)))))

    torch.manual_seed(0)
    model = Twice().eval()
    data = list(torch.randn(3, 16, 6, generator=torch.Generator().manual_seed(0)))
    qmodel = calibrated(model, data)
    found = reconstruct(qmodel, data, method="brecq", scale_lr=0.01, held_out=0.0, **QUICK)
    assert gain(found) < 1 and "layer" in reconstruct(qmodel, data, method="adaround", steps=5)
    check_weights_hold_their_values(qmodel)


@pytest.mark.parametrize(("options", "message"), [
    ({"method": "best"}, "method"), ({"rounding": "up"}, "rounding"), ({"drop": 2.0}, "drop"), ({"lr": -1.0}, "lr"),
    ({"steps": 0}, "steps"), ({"views": -1}, "views"), ({"blocks": ["nowhere"]}, "no node of the graph"),
    ({"blocks": []}, "at least one module"),
])  # fmt: skip
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    data = batches(1)
    with pytest.raises(ConfigError, match=message):
        reconstruct(calibrated(float_model(), data), data, **options)


def test_views_are_new_in_every_step() -> None:
    """Patches, errors inside the network, a divergence: two runs have equal bits, and the error falls."""
    model, data = float_model(), batches()
    states, options = [], {"patched": 0.5, "features": 1.0, "loss": "kl", "temperature": 2.0}
    for _ in range(2):
        qmodel = calibrated(model, data)
        before = error(qmodel, model, data)
        found = reconstruct(qmodel, data, method="distill", views=0, lr=0.02, **options, **QUICK)  # type: ignore[arg-type]
        assert found["network"].is_kept and error(qmodel, model, data) < 0.9 * before
        check_weights_hold_their_values(qmodel)
        states.append(qmodel.state_dict())
    assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())


def test_new_views_are_not_those_of_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """No two steps see the same image; without `views=0` all see the stored ones."""
    seen: list[list[Tensor]] = []
    train = reconstruction.train_block

    def watched(data: Any, *args: Any, teacher: Any, **kwargs: Any) -> Any:
        images: list[Tensor] = []
        seen.append(images)
        target = data if teacher is None else teacher
        own = target.run

        def watching(inputs: Any) -> Any:
            if torch.is_grad_enabled():
                images.extend(inputs[0])
            return own(inputs)

        target.run = watching
        return train(data, *args, teacher=teacher, **kwargs)

    monkeypatch.setattr(reconstruction, "train_block", watched)
    data = batches(1)
    for views in (1, 0):
        options: dict[str, Any] = {"views": views, "steps": 8, "batch_size": 12, "lr": 0.001}
        reconstruct(calibrated(float_model(), data), data, method="distill", **options)
    distinct = [len({tuple(image.flatten().tolist()) for image in images}) for images in seen]
    assert distinct[0] == 12 and distinct[1] > 60


def test_a_hopeless_training_of_the_network_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    train = reconstruction.train_block

    def counted(data: Any, *args: Any, distance: Any, **kwargs: Any) -> Any:
        def counting(*values: Any) -> Tensor:
            steps.append(1)
            return distance(*values)

        return train(data, *args, distance=counting, **kwargs)

    monkeypatch.setattr(reconstruction, "train_block", counted)
    data = batches()
    qmodel = calibrated(float_model(), data)
    before = {name: tensor.clone() for name, tensor in qmodel.state_dict().items()}
    found = reconstruct(qmodel, data, method="distill", views=0, lr=5.0, **QUICK)
    assert len(steps) == 20 and not found["network"].is_kept
    assert all(torch.equal(before[name], tensor) for name, tensor in qmodel.state_dict().items())


@pytest.mark.gpu
def test_the_network_on_a_gpu_with_and_without_a_captured_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The floats of both differ in their last bits only."""
    config, data = CONFIG.replace("cpu", "cuda"), [x.cuda() for x in batches()]
    options: dict[str, Any] = {"views": 0, "patched": 0.5, "features": 1.0, "steps": 6, "batch_size": 12, "lr": 0.001}
    found = []
    for is_captured in (True, False):
        qmodel = tiny.calibrated(float_model().cuda(), data, config, example_inputs=data[0])
        with monkeypatch.context() as patch:
            if not is_captured:
                patch.setattr(CapturedStep, "_capture", lambda *_: None)
            found.append(reconstruct(qmodel, data, method="distill", **options)["network"])
    assert found[0].held_after == pytest.approx(found[1].held_after, rel=0.02)
    assert found[0].held_after != found[0].held_before


def test_sizes_between_blocks_are_not_compared() -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(64, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.one(x))
            count = x.shape[0]
            return self.head(torch.relu(self.two(x)).reshape(count, -1))

    torch.manual_seed(0)
    data = batches()
    qmodel = calibrated(Sized().eval(), data)
    seen: list[int] = []
    qmodel.visit_blocks(data, lambda block: seen.extend(type(v) is int for v in block.inputs[0]))
    assert any(seen)  # otherwise this tests nothing
    options: dict[str, Any] = {"views": 0, "features": 1.0, "lr": 0.001}
    assert set(reconstruct(qmodel, data, method="distill", **options, **QUICK)) == {"network"}


def test_a_network_that_answers_with_classes_alone_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    class Classes(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).argmax(1)

    torch.manual_seed(0)
    data = batches(1)
    qmodel = calibrated(Classes().eval(), data)
    assert reconstruct(qmodel, data, method="distill", views=0, **QUICK) == {}
    assert "network: it has no float output to compare" in caplog.text


def test_views_that_the_network_cannot_answer(caplog: pytest.LogCaptureFixture) -> None:
    """Zeros move in with a shifted image: their logarithm is infinite. The result is that of before."""

    class Logarithms(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.log())

    torch.manual_seed(0)
    data = [x + 0.1 for x in batches()]
    qmodel = calibrated(Logarithms().eval(), data)
    start = {name: tensor.clone() for name, tensor in qmodel.state_dict().items()}
    found = reconstruct(qmodel, data, method="distill", views=0, **QUICK)
    assert not found["network"].is_kept and "network is unchanged" in caplog.text
    assert all(torch.equal(start[name], tensor) for name, tensor in qmodel.state_dict().items())
    check_weights_hold_their_values(qmodel)


def test_fisher_information_of_low_rank() -> None:
    model, data = float_model(), batches()
    qmodel = calibrated(model, data)
    assert gain(reconstruct(qmodel, data, method="brecq", fisher_rank=3, **QUICK)) < 0.95
    check_weights_hold_their_values(qmodel)


@pytest.mark.parametrize(("options", "message"), [
    ({"views": 0}, "are for the whole network, and the blocks are 'blocks'"),
    ({"features": 1.0, "blocks": "layers"}, "whole network"), ({"loss": "kl", "method": "brecq"}, "whole network"),
    ({"method": "distill", "patched": 0.5}, "set views=0"), ({"fisher_rank": 2}, "needs fisher=True"),
    ({"method": "distill", "fisher": True, "fisher_rank": 2}, "blocks of the network"),
])  # fmt: skip
def test_options_that_would_have_no_effect(options: dict[str, Any], message: str) -> None:
    data = batches(1)
    with pytest.raises(ConfigError, match=message):
        reconstruct(calibrated(float_model(), data), data, **options)


def test_data_that_is_not_finite_is_named_as_the_cause() -> None:
    data = batches(1)
    with pytest.raises(CalibrationError, match=r"before anything is learned.*NaN and infinity in the calibration data"):
        reconstruct(calibrated(float_model(), data), [data[0] * float("nan")], steps=2, held_out=0)


class SplitBetween(nn.Module):
    """The blocks behind the first one read parts of its output: a tuple crosses their border."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.two = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 4, 3), nn.Conv2d(5, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        left, right = torch.relu(self.first(x)).split([3, 5], 1)
        return self.one(left) + self.two(right)


@pytest.mark.parametrize("method", ["brecq", "qdrop", "autoround"])
def test_a_tuple_between_blocks(method: Method) -> None:
    torch.manual_seed(0)
    model, data = SplitBetween().eval(), list(torch.randn(3, 8, 3, 6, 6))
    qmodel = tiny.calibrated(model, data, tiny.qconfig(bits=3), example_inputs=data[0])
    found = reconstruct(qmodel, data, method=method, steps=20, float_share=0.5)
    assert any(result.after < result.before for result in found.values())


def test_a_config_names_it() -> None:
    model, data = float_model(), batches()
    steps = [{"gptq": {"SWEEPS": 0}}, {"reconstruct": {"METHOD": "brecq", "STEPS": 5, "BLOCKS": ["stem", "head"]}}]
    config = {"DEVICE": "cpu", "W": {"QUANTIZER": {"BIT": 4}}, "A": {"QUANTIZER": {"BIT": 8}}, "ALGORITHMS": steps}
    qmodel = sparsebit.quantize(model, data, config)
    assert qmodel.applied_algorithms == ("gptq", "reconstruct")
    check_weights_hold_their_values(qmodel)
