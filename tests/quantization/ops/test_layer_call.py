"""Layers whose weight comes from somewhere else, whose hooks are called, and which several threads share."""

from __future__ import annotations

import copy
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from sparsebit.quantization import QuantModel
from sparsebit.quantization.ops.layer_call import call_with_hooks, current_weight, forward_with
from tests.quantization.tiny import calibrated, qconfig

Change = Callable[[nn.Module], Any]

with pytest.warns(FutureWarning):
    nn.utils.weight_norm(nn.Linear(2, 2))  # torch tells once that there is a newer one


def old_weight_norm(layer: nn.Module) -> None:
    nn.utils.weight_norm(layer)


def old_spectral_norm(layer: nn.Module) -> None:
    nn.utils.spectral_norm(layer)


def pruned(layer: nn.Module) -> None:
    prune.l1_unstructured(layer, "weight", amount=0.3)


def pruned_twice(layer: nn.Module) -> None:
    prune.l1_unstructured(layer, "weight", amount=0.3)
    prune.random_unstructured(layer, "weight", amount=0.1)
    if getattr(layer, "bias", None) is not None:
        prune.l1_unstructured(layer, "bias", amount=0.3)


class Halved(nn.Module):
    def forward(self, tensor: Tensor) -> Tensor:
        return tensor / 2


def halved_bias(layer: nn.Module) -> None:
    parametrize.register_parametrization(layer, "bias", Halved())


def halved_both(layer: nn.Module) -> None:
    parametrize.register_parametrization(layer, "weight", Halved())
    parametrize.register_parametrization(layer, "bias", Halved())


COMPUTED = [pruned, pruned_twice, old_weight_norm, old_spectral_norm, parametrizations.weight_norm]
LAYERS: list[tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = [
    (lambda: nn.Linear(6, 5), lambda: torch.randn(4, 6)),
    (lambda: nn.Conv2d(3, 5, 3), lambda: torch.randn(2, 3, 8, 8)),
    (lambda: nn.ConvTranspose2d(3, 5, 3, stride=2), lambda: torch.randn(2, 3, 4, 4)),
    (lambda: nn.Embedding(7, 5), lambda: torch.randint(7, (4, 3))),
]


class Alone(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y * 1.0


@pytest.mark.sample(10)
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("change", COMPUTED, ids=lambda change: change.__name__)
@pytest.mark.parametrize("place", range(len(LAYERS)), ids=["linear", "conv", "conv_transpose", "embedding"])
def test_computed_weights_are_quantized(place: int, change: Change) -> None:
    torch.manual_seed(0)
    make, give = LAYERS[place]
    layer, x = make(), give()
    change(layer)
    model = Alone(layer).eval()
    errors = []
    for bits in (2, 16):
        qmodel = calibrated(model, [x], qconfig(bits=bits))
        with torch.no_grad():
            errors.append(float((qmodel(x) - model(x)).norm() / model(x).norm()))
    assert errors[0] > 0.02 and errors[1] < 1e-3
    (quantized,) = (m for m in qmodel.modules() if type(m).__name__ == "WeightedQuantOpr")
    assert not quantized.weight_quantizer.fake_fused


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("change", COMPUTED, ids=lambda change: change.__name__)
def test_computed_weights_are_saved_and_exported(change: Change, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(6, 5), torch.randn(4, 6)
    change(layer)
    model = Alone(layer).eval()
    qmodel = calibrated(model, [x], qconfig(backend="onnxruntime"))
    expected = qmodel(x)
    assert qmodel.export_onnx(x, tmp_path / "model.onnx", check=[x]) is not None
    fresh = nn.Linear(6, 5)
    change(fresh)
    loaded = QuantModel.load(qmodel.save(tmp_path / "saved"), Alone(fresh).eval())
    assert torch.equal(loaded(x), expected)
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(qmodel)(x), expected)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("change", COMPUTED, ids=lambda change: change.__name__)
def test_computed_weights_are_trained(change: Change) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(6, 5), torch.randn(16, 6)
    change(layer)
    model = Alone(layer)
    qmodel = calibrated(model, [x], qconfig(bits=16)).train()
    model.train()
    copied = copy.deepcopy(QuantModel(model, qconfig()).model)  # spectral norms move with each forward of training
    qmodel(x).square().mean().backward()
    copied(x).square().mean().backward()
    wanted = {name.rpartition(".")[2]: p.grad for name, p in copied.named_parameters() if p.grad is not None}
    found = {name.rpartition(".")[2]: p.grad for name, p in qmodel.named_parameters() if p.grad is not None}
    assert wanted.keys() <= found.keys()
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, atol=2e-3, rtol=2e-2)


@pytest.mark.parametrize("change", [halved_bias, halved_both])
@pytest.mark.parametrize("backend", ["virtual", "onnxruntime"])
@pytest.mark.parametrize("place", [0, 1, 2], ids=["linear", "conv", "conv_transpose"])
def test_parametrized_biases(place: int, backend: str, change: Change) -> None:
    torch.manual_seed(0)
    make, give = LAYERS[place]
    layer, x = make(), give()
    change(layer)
    model = Alone(layer).eval()
    qmodel = calibrated(model, [x], qconfig(backend=backend))
    with torch.no_grad():
        assert (qmodel(x) - model(x)).norm() < 0.02 * model(x).norm()


def test_a_weight_that_changed_since_the_last_forward_is_computed_again() -> None:
    layer = nn.Linear(3, 2)
    prune.l1_unstructured(layer, "weight", amount=0.5)
    with torch.no_grad():
        layer.weight_orig.fill_(7.0)
    assert float(current_weight(layer).detach().max()) == 7.0


class Subclass(nn.Linear):
    """With a forward of its own, which counts."""

    num_calls = 0

    def forward(self, input: Tensor) -> Tensor:
        self.num_calls += 1
        self.last = input
        return super().forward(input) * 2


def test_what_a_forward_assigns_stays() -> None:
    layer, x = Subclass(3, 2), torch.randn(4, 3)
    weight = torch.ones(2, 3)
    found = forward_with(layer, weight, layer.bias, (x,), {})
    torch.testing.assert_close(found, F.linear(x, weight, layer.bias) * 2)
    assert layer.num_calls == 1 and layer.last is x and isinstance(layer.weight, nn.Parameter)


def test_a_forward_that_was_put_into_an_instance_sees_the_weight() -> None:
    layer, x, weight = nn.Linear(3, 2, bias=False), torch.randn(4, 3), torch.ones(2, 3)
    layer.forward = types.MethodType(lambda self, x: F.linear(x, self.weight) + 1, layer)  # type: ignore[method-assign]
    torch.testing.assert_close(forward_with(layer, weight, None, (x,), {}), F.linear(x, weight) + 1)
    own = layer.weight
    layer.forward = lambda x: F.linear(x, layer.weight) + 2  # type: ignore[method-assign]
    torch.testing.assert_close(forward_with(layer, weight, None, (x,), {}), F.linear(x, weight) + 2)
    assert layer.weight is own


@pytest.mark.parametrize("backward", [False, True])
def test_hooks_see_the_layer_and_what_it_is_given(backward: bool) -> None:
    layer, x = nn.Linear(3, 2), torch.randn(4, 3, requires_grad=True)
    seen: list[Any] = []
    layer.register_forward_pre_hook(lambda module, args: seen.append((module, args[0])) or (args[0] * 2,))
    layer.register_forward_hook(lambda module, args, kwargs, output: seen.append(module) or -output, with_kwargs=True)
    if backward:
        layer.register_full_backward_hook(lambda module, *_: seen.append(module))
    output = call_with_hooks(layer, lambda x: x + 1, (x,), {})
    torch.testing.assert_close(output, -(x * 2 + 1))
    output.sum().backward()
    assert seen[0] == (layer, x) and seen[1:] == [layer] * (2 if backward else 1)


@pytest.mark.parametrize("backend", ["virtual", "onnxruntime"])
def test_a_hook_is_called_once_with_the_layers_values(backend: str) -> None:
    torch.manual_seed(0)
    layer, x, outputs = nn.Linear(6, 5), torch.randn(4, 6), []
    layer.register_forward_hook(lambda *given: outputs.append(given[-1]))
    qmodel = calibrated(nn.Sequential(layer, nn.Linear(5, 3)).eval(), [x], qconfig(backend=backend))
    outputs.clear()
    with torch.no_grad():
        qmodel(x)
    assert len(outputs) == 1 and float(outputs[0].abs().max()) < 10  # not a kernel's integers


@pytest.mark.parametrize("kind", ["embedding", "transposed", "hooked", "subclass", "pruned", "patched"])
def test_threads_share_a_model(kind: str) -> None:
    torch.manual_seed(0)
    layer: nn.Module = {
        "embedding": lambda: nn.Embedding(64, 64),
        "transposed": lambda: nn.ConvTranspose1d(64, 64, 3),
        "subclass": lambda: Subclass(64, 64),
    }.get(kind, lambda: nn.Linear(64, 64))()
    x = torch.randint(64, (8, 16)) if kind == "embedding" else torch.randn(8, 64)
    x = torch.randn(2, 64, 8) if kind == "transposed" else x
    if kind == "pruned":
        pruned(layer)
    elif kind == "hooked":
        layer.register_forward_hook(lambda *_: None)
    elif kind == "patched":
        layer.forward = types.MethodType(nn.Linear.forward, layer)  # type: ignore[method-assign]
    qmodel = calibrated(Alone(layer).eval(), [x], qconfig(bits=4)).eval()
    weights = {name: value.clone() for name, value in qmodel.state_dict().items()}
    wrong: list[str] = []
    with torch.no_grad():
        expected = qmodel(x)

    def run() -> None:
        with torch.no_grad():
            wrong.extend("output" for _ in range(100) if not torch.equal(qmodel(x), expected))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert all(torch.equal(value, weights[name]) for name, value in qmodel.state_dict().items())


@pytest.mark.parametrize("compute", [nn.utils.spectral_norm, parametrizations.spectral_norm], ids=["old", "new"])
def test_a_spectral_norm_takes_the_models_steps_in_training(compute: Any) -> None:
    """It takes one at every read of the weight in train mode: building and calibrating must not read it so."""
    model, x = nn.Sequential(compute(nn.Linear(8, 8))).train(), torch.randn(4, 8)
    twin = copy.deepcopy(model)
    qmodel = QuantModel(model, qconfig(bits=16)).train()
    str(qmodel.coverage)
    for _ in range(2):
        torch.testing.assert_close(qmodel(x), twin(x), rtol=0, atol=1e-6)
    qmodel.prepare_calibration()
    qmodel.train()
    torch.testing.assert_close(qmodel(x), twin(x), rtol=0, atol=1e-6)
    qmodel.calc_qparams()
    qmodel.set_quant(w_quant=True, a_quant=True)
    torch.testing.assert_close(qmodel(x), twin(x), rtol=0, atol=1e-3)
    buffers = {name.rpartition(".")[2]: value for name, value in twin.named_buffers()}
    found = {name.rpartition(".")[2]: value for name, value in qmodel.model.named_buffers()}
    for name, value in buffers.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)
