from __future__ import annotations

import copy
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from sparsebit.quantization import QuantModel, parse_qconfig
from sparsebit.quantization.ops.quant_opr import WeightedQuantOpr
from sparsebit.quantization.speed import weight_batches
from sparsebit.quantization.speed.fusion_guards import substitute_of
from tests.quantization.tiny import calibrated, prepared, qconfig


@pytest.fixture
def batched(interpreted_kernels: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights on the CPU count as being on a GPU; kernels are interpreted."""
    monkeypatch.setattr(weight_batches, "shows_kernels", lambda weight: True)


def ready(kind: str) -> QuantModel:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, groups=6), nn.Flatten()),
        *(nn.Linear(96, 5), nn.ReLU(), nn.Linear(5, 4)),
    )
    config = {
        "DEVICE": "cpu",
        "W": {
            "QSCHEME": "per-channel-symmetric",
            "QUANTIZER": {"TYPE": kind, "BIT": 4},
            "SPECIFIC": [{"7": ["QSCHEME", "per-tensor-symmetric"]}],
        },
        "A": {"QUANTIZER": {"TYPE": "lsq", "BIT": 4}},
    }
    qmodel = prepared(model, [images()], parse_qconfig(config))
    qmodel.init_QAT()
    return qmodel.train()


def has_weight(layer: nn.Module) -> bool:
    return getattr(substitute_of(layer), "quantized_weight", None) is not None


def images() -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.usefixtures("batched")
@pytest.mark.parametrize(("largest", "num_batches"), [(1 << 20, 1), (300, 2)], ids=["one batch", "two batches"])
@pytest.mark.parametrize("kind", ["lsq", "uniform"])
def test_a_step_is_that_of_the_layers_one_by_one(
    kind: str, largest: int, num_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_batches, "LARGEST_BATCH", largest)
    together = ready(kind)
    alone = copy.deepcopy(together).train()
    alone.qat.fused.weights = None  # type: ignore[union-attr]
    outputs = [qmodel(images()) for qmodel in (together, alone)]
    assert len(together.qat.fused.weights.batches) == num_batches  # type: ignore[union-attr]
    assert torch.equal(*outputs)
    for output in outputs:
        output.square().sum().backward()
    for (name, one), two in zip(together.named_parameters(), alone.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None), name
        if one.grad is not None:
            torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.usefixtures("batched")
def test_layers_hold_their_batched_weights_during_the_forward_alone() -> None:
    qmodel = ready("lsq")
    seen: dict[str, bool] = {}
    layers = {name: layer for name, layer in qmodel.model.named_modules() if isinstance(layer, WeightedQuantOpr)}
    for name, layer in layers.items():
        layer.register_forward_pre_hook(lambda layer, _, name=name: seen.update({name: has_weight(layer)}))
    qmodel(images())
    assert seen == {"0": True, "3": True, "5": True, "7": False}  # one scale for all channels: by itself
    assert not any(map(has_weight, layers.values()))
    with torch.no_grad():
        qmodel(images())
    assert not any(seen.values())


class Opaque(nn.Module):
    """Code that cannot be traced, and that computes a part of itself again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if float(x.sum()) > 1e9:
            return x
        return checkpoint(lambda y: self.second(self.first(y).relu()), x, use_reentrant=False).mean((2, 3))


@pytest.mark.usefixtures("batched")
def test_what_opaque_code_computes_again_is_not_batched() -> None:
    weights = {"QSCHEME": "per-channel-symmetric", "QUANTIZER": {"TYPE": "lsq", "BIT": 4}}
    config = {"DEVICE": "cpu", "W": weights, "A": {"QUANTIZER": {"DISABLE": True}}}
    qmodel = prepared(Opaque(), [images()], parse_qconfig(config))
    qmodel.init_QAT()
    qmodel.train()(images()).sum().backward()
    assert all(parameter.grad is not None for parameter in qmodel.parameters())


@pytest.mark.usefixtures("batched")
def test_a_layer_that_is_checkpointed_by_itself_is_not_batched() -> None:
    qmodel = ready("lsq")
    layer = qmodel.model.get_submodule("3")
    own = layer.forward
    layer.forward = lambda *args: checkpoint(own, *args, use_reentrant=False)  # type: ignore[method-assign]
    qmodel(images()).square().sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


@pytest.mark.usefixtures("batched")
def test_a_failing_forward_leaves_no_weight_behind() -> None:
    qmodel = ready("lsq")
    with pytest.raises(RuntimeError):
        qmodel(torch.randn(4, 3, 2, 2))
    assert not any(map(has_weight, qmodel.modules()))


def test_on_a_cpu_layers_quantize_by_themselves() -> None:
    qmodel = ready("lsq")
    with qmodel.qat.fused.step():  # type: ignore[union-attr]
        assert not any(map(has_weight, qmodel.modules()))


@pytest.mark.usefixtures("batched")
def test_a_hook_on_a_weight_quantizer_is_called() -> None:
    qmodel = ready("lsq")
    calls = []
    layer = next(module for module in qmodel.modules() if isinstance(module, WeightedQuantOpr))
    layer.weight_quantizer.register_forward_hook(lambda *call: calls.append(call))
    qmodel(images())
    assert len(calls) == 1


def test_a_weight_that_is_computed_when_it_is_read_is_read_once() -> None:
    layer = parametrizations.spectral_norm(nn.Linear(8, 8))
    model, x = nn.Sequential(layer, nn.ReLU()), torch.randn(4, 8)
    qmodel = calibrated(copy.deepcopy(model).eval(), [x], qconfig(bits=16)).train()
    for _ in range(3):
        torch.testing.assert_close(qmodel(x), model(x), rtol=0, atol=1e-3)
    (power,) = (module for module in qmodel.modules() if hasattr(module, "_u"))
    torch.testing.assert_close(power._u, layer.parametrizations.weight[0]._u, rtol=0, atol=1e-5)
