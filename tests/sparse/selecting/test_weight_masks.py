"""Masks act in every mode and through every way into the model, and in copies and averages of it."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import sparsebit
from sparsebit.sparse import SparseModel
from tests.sparse.nets import Chain, images


def pruned(ratio: float = 0.5, kind: str = "unstructured", model: nn.Module | None = None) -> SparseModel:
    torch.manual_seed(0)
    config = {"DEVICE": "cpu", "SPARSER": {"TYPE": kind, "RATIO": ratio}}
    return SparseModel(Chain() if model is None else model, config, images())


def holds(smodel: SparseModel) -> bool:
    """Whether masks prune something, and weights and gradients are zero there."""
    weights = {name: smodel.model.get_parameter(name) for name in smodel.masks}
    return all(
        bool((~mask).any())
        and not weights[name][~mask].any()
        and (weights[name].grad is None or not weights[name].grad[~mask].any())  # type: ignore[index]
        for name, mask in smodel.masks.items()
    )


def step(model: nn.Module, parameters: Any, run: Callable[[Tensor], Tensor] | None = None) -> None:
    """A step of training with momentum from before, which moves weights whose gradients are zero."""
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for parameter in parameters:
        optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
    (run or model)(images()).square().mean().backward()
    optimizer.step()


def by_state(average: nn.Module, model: nn.Module, decay: float = 0.9998) -> None:
    """As timm's `ModelEmaV2.update`."""
    with torch.no_grad():
        for mean, value in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
            mean.copy_(decay * mean + (1.0 - decay) * value)


@pytest.mark.parametrize("part", ["whole", "inner"])
def test_an_average_that_was_made_before_pruning_gets_the_masks(part: str) -> None:
    smodel = pruned()
    average = copy.deepcopy(smodel if part == "whole" else smodel.model)
    smodel.calc_params()
    for _ in range(2):
        by_state(average, smodel if part == "whole" else smodel.model)
    average.eval()(images())
    inner = average.model if part == "whole" else average
    assert all(not inner.get_parameter(name)[~mask].any() for name, mask in smodel.masks.items())
    assert all(inner.get_parameter(name)[mask].any() for name, mask in smodel.masks.items())


@pytest.mark.parametrize(
    "options",
    [{}, {"avg_fn": get_ema_avg_fn(0.999)}, {"multi_avg_fn": get_ema_multi_avg_fn(0.999)}],
    ids=["swa", "ema", "ema of lists"],
)
def test_averages_of_torch_get_the_masks(options: dict[str, Any]) -> None:
    smodel = pruned()
    average = AveragedModel(smodel, use_buffers=True, **options)
    average.update_parameters(smodel)
    smodel.calc_params()
    average.update_parameters(smodel)
    average.update_parameters(smodel)
    assert holds(average.module.eval())
    assert all(torch.equal(mask, smodel.masks[name]) for name, mask in average.module.masks.items())


def pickled(smodel: SparseModel) -> SparseModel:
    file = io.BytesIO()
    torch.save(smodel, file)
    file.seek(0)
    again: SparseModel = torch.load(file, weights_only=False)
    return again


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("kind", ["structured", "unstructured"])
def test_gradients_of_copies_are_zero_too(copied: Callable[[SparseModel], SparseModel], kind: str) -> None:
    smodel = pruned(kind=kind)
    smodel.calc_params()
    again = copied(smodel)
    step(again, list(again.parameters()))
    again(images())
    assert holds(again) and all(p.grad is None for p in smodel.parameters())
    assert any(p.grad is not None and p.grad.any() for p in again.parameters())


@pytest.mark.parametrize("way", ["eval mode", "inner model", "inner model in eval mode", "layers"])
def test_zeros_stay_however_the_model_is_trained(way: str) -> None:
    smodel = pruned()
    smodel.calc_params()
    if "eval" in way:
        smodel.eval()
    inner = smodel.model

    def layers(x: Tensor) -> Tensor:
        return inner.head(inner.b(torch.relu(inner.bn(inner.a(x)))).flatten(1))

    run: Any = {"eval mode": smodel, "layers": layers}.get(way, inner)
    for _ in range(2):
        step(smodel, list(smodel.parameters()), run)
    seen = {}
    handles = [
        module.register_forward_hook(lambda m, *_, n=name: seen.update({n: m.weight.detach().clone()}))
        for name, module in inner.named_modules()
        if f"{name}.weight" in smodel.masks
    ]
    with torch.no_grad():
        run(images())
    for handle in handles:
        handle.remove()
    assert len(seen) == 3 and all(not weight[~smodel.masks[f"{n}.weight"]].any() for n, weight in seen.items())
    assert holds(smodel)


def test_a_state_has_the_zeros_whichever_part_is_asked() -> None:
    smodel = pruned()
    smodel.calc_params()
    for part, prefix in ((smodel, "model."), (smodel.model, ""), (smodel.model.a, None)):
        step(smodel, list(smodel.parameters()))
        state = part.state_dict()
        name = "weight" if prefix is None else f"{prefix}a.weight"
        assert not state[name][~smodel.masks["a.weight"]].any()


def test_copies_share_the_model_that_was_given() -> None:
    """It is only read, and may be one that cannot be copied: torch's own pruning keeps a computed weight in it."""
    model = nn.Sequential(prune.l1_unstructured(nn.Linear(6, 4), "weight", 0.3))
    smodel = SparseModel(model, {"DEVICE": "cpu", "SPARSER": {"TYPE": "unstructured", "RATIO": 0.5}})
    smodel.calc_params()
    again = copy.deepcopy(smodel)
    assert holds(again) and again._given[0] is model


def test_gradients_of_before_are_masked_too() -> None:
    smodel = pruned()
    smodel(images()).square().mean().backward()
    smodel.calc_params()
    assert holds(smodel) and smodel.model.a.weight.grad.any()


def test_a_weight_that_is_trained_later_is_masked_too() -> None:
    model = Chain().requires_grad_(False)
    smodel = pruned(model=model)
    smodel.calc_params()
    smodel.model.requires_grad_(True)
    smodel(images()).square().mean().backward()
    assert holds(smodel) and smodel.model.a.weight.grad is not None


def test_layers_that_run_several_times_can_be_trained() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = torch.tanh(self.cell(x))
            return self.head(x)

    smodel = SparseModel(Loop(), {"DEVICE": "cpu", "SPARSER": {"TYPE": "unstructured", "RATIO": 0.5}})
    smodel.calc_params()
    (smodel(torch.randn(2, 6)) + smodel(torch.randn(2, 6))).sum().backward()
    assert holds(smodel)


def test_attention_that_is_called_alone_reads_masked_weights() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    smodel = SparseModel(model, {"DEVICE": "cpu", "SPARSER": {"TYPE": "unstructured", "RATIO": 0.5}})
    smodel.calc_params()
    attention, x = smodel.model.self_attn, torch.randn(2, 5, 8)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.add_(1)
        attention(x, x, x)
    assert not attention.out_proj.weight[~smodel.masks["self_attn.out_proj.weight"]].any()
    assert not attention.in_proj_weight[~smodel.masks["self_attn.in_proj_weight"]].any()


def test_states_of_earlier_versions_are_read() -> None:
    smodel = pruned()
    smodel.calc_params()
    state = {name: value for name, value in smodel.state_dict().items() if not name.endswith("_pruned")}
    state |= {f"model.{name}_mask": mask for name, mask in smodel.masks.items()}
    again = pruned()
    again.load_state_dict(state)
    assert all(torch.equal(mask, again.masks[name]) for name, mask in smodel.masks.items())


def test_the_inner_model_is_captured_like_the_plain_one() -> None:
    smodel = pruned()
    smodel.calc_params()
    smodel.eval()
    found = [sparsebit.quantize(m, [images()], "onnxruntime") for m in (smodel.model, smodel.masked_model())]
    assert str(found[0].coverage) == str(found[1].coverage)
    assert not [m for m in smodel.masked_model().modules() if m._forward_pre_hooks or m._state_dict_pre_hooks]


def test_inference_mode(caplog: pytest.LogCaptureFixture) -> None:
    smodel = pruned()
    with caplog.at_level(logging.INFO, logger="sparsebit"):
        smodel.calc_params()
    assert "weights are zero (0.5" in caplog.text
    with torch.inference_mode():
        expected = smodel.eval()(images()).shape
    assert expected[1] == 5 and holds(smodel)
