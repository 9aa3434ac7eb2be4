from __future__ import annotations

import copy
import pickle
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sparsebit.errors import ConfigError
from sparsebit.quantization import QuantModel
from sparsebit.quantization.speed import Savings
from sparsebit.quantization.speed.fusion_guards import REASONS, substitute_of
from tests.quantization.tiny import calibrated, qconfig
from tests.quantization.tiny_training import data, ready

# Steps of a random graph of (N, 6, 4, 4) tensors, by name: each takes and gives one.
STEPS = ("conv", "relu", "function relu", "gelu", "silu", "norm", "residual", "selects", "dropout", "reused", "written")


class Chain(nn.Module):
    """A graph made of `STEPS`."""

    def __init__(self, steps: list[str]) -> None:
        super().__init__()
        self.steps = steps
        self.convs = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in steps)
        self.norms = nn.ModuleList(nn.BatchNorm2d(6) for _ in steps)
        self.relu, self.gelu, self.silu, self.dropout = nn.ReLU(), nn.GELU(), nn.SiLU(), nn.Dropout(0.0)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for place, step in enumerate(self.steps):
            if step == "conv":
                x = self.convs[place](x)
            elif step in ("relu", "dropout"):
                x = getattr(self, step)(x)
            elif step in ("gelu", "silu"):
                x = getattr(self, step)(self.convs[place](x))
            elif step == "function relu":
                x = F.relu(x)
            elif step == "norm":
                x = self.norms[place](x)
            elif step == "residual":
                x = x + self.convs[place](F.relu(x))
            elif step == "selects":
                y = x.reshape(x.shape[0], 3, 2, 4, 4)
                q, k, v = (y.select(1, index) for index in range(3))
                scores = torch.matmul(q, k)
                x = torch.cat([scores, v, scores], 1)
            elif step == "reused":
                x = self.convs[0](self.relu(self.convs[0](x)))
            else:
                y = self.relu(x)
                x = x.clone().mul_(0.5) + self.convs[place](y)
        return self.last(F.relu(x).mean((2, 3)))


def trained(steps: list[str], kind: str = "lsq", **keys: object) -> QuantModel:
    """In training mode, after calibration."""
    torch.manual_seed(0)
    affine = {"A.QSCHEME": "per-tensor-affine", "A.QUANTIZER.TYPE": kind, "W.QUANTIZER.TYPE": "lsq"}
    return calibrated(Chain(steps), [images()], qconfig(affine | keys)).train()


def images() -> Tensor:
    return torch.randn(2, 6, 4, 4, generator=torch.Generator().manual_seed(1))


def step(qmodel: QuantModel, x: Tensor) -> dict[str, Tensor | None]:
    qmodel.zero_grad()
    x = x.clone().requires_grad_()
    output = qmodel(x)
    output.square().sum().backward()
    return {"output": output.detach(), "x": x.grad} | {name: p.grad for name, p in qmodel.named_parameters()}


@pytest.mark.slow
@settings(max_examples=20)
@given(
    steps=st.lists(st.sampled_from(STEPS), min_size=1, max_size=5),
    kind=st.sampled_from(["lsq", "lsq+", "uniform", "pact"]),
    packs=st.booleans(),
)
def test_values_and_gradients_are_those_of_the_plain_path(steps: list[str], kind: str, packs: bool) -> None:
    qmodel = trained(steps, kind)
    plain = copy.deepcopy(qmodel)
    plain.accelerate(False)
    if packs:
        qmodel.pack_saved_activations()
    for _ in range(2):
        found, expected = step(qmodel, images()), step(plain, images())
        for name, value in expected.items():
            other = found[name]
            assert (value is None) == (other is None), name
            if value is not None:
                torch.testing.assert_close(
                    other, value, rtol=1e-4, atol=1e-5, msg=lambda told, name=name: f"{name}: {told}"
                )
    for (name, one), two in zip(qmodel.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(one, two), name


def substituted(qmodel: QuantModel) -> list[str]:
    return [name for name, module in qmodel.named_modules() if substitute_of(module) is not None]


def test_eval_puts_the_plain_forwards_back() -> None:
    qmodel = ready("lsq")
    graph, names, coverage = str(qmodel.model.graph), list(qmodel.state_dict()), str(qmodel.coverage)
    qmodel.train()
    qmodel(data()[0])
    assert substituted(qmodel)
    assert (str(qmodel.model.graph), list(qmodel.state_dict()), str(qmodel.coverage)) == (graph, names, coverage)
    qmodel.eval()
    assert not substituted(qmodel)
    qmodel.train()
    qmodel.accelerate(False)
    assert not substituted(qmodel)
    qmodel(data()[0])
    assert not substituted(qmodel)
    qmodel.accelerate()
    assert substituted(qmodel)


@pytest.mark.parametrize("how", ["copied", "pickled", "saved"])
def test_copies_of_a_model_that_trains(how: str, tmp_path: Path) -> None:
    qmodel = trained(["conv", "relu", "conv", "residual"])
    expected = step(qmodel, images())
    if how == "copied":
        other = copy.deepcopy(qmodel)
    elif how == "pickled":
        other = pickle.loads(pickle.dumps(qmodel))
    else:
        qmodel.save(tmp_path / "saved")
        other = QuantModel.load(tmp_path / "saved", Chain(["conv", "relu", "conv", "residual"])).train()
    with torch.no_grad():  # what the original learns from now on is its own
        for parameter in qmodel.parameters():
            parameter.add_(1.0)
    found = step(other, images())
    assert all(torch.equal(found[name], value) for name, value in expected.items() if value is not None)  # type: ignore[arg-type]


def test_a_graph_that_is_changed_while_it_trains() -> None:
    qmodel = trained(["conv", "norm", "relu", "conv"], **{"SCHEDULE.FUSE_BN": False})
    for _ in range(3):
        qmodel(images())
    qmodel.freeze("batchnorm")
    qmodel.fold_batchnorm()
    found = qmodel(images())
    qmodel.accelerate(False)
    torch.testing.assert_close(found, qmodel(images()))


def test_a_module_that_is_replaced_while_it_trains() -> None:
    qmodel = trained(["conv", "relu", "conv"])
    qmodel(images())
    qmodel.model.set_submodule("convs.2", nn.Identity())
    found = qmodel(images())
    qmodel.accelerate(False)
    torch.testing.assert_close(found, qmodel(images()))


@pytest.mark.sample(4)
@pytest.mark.parametrize("left_out", [field.name for field in fields(Savings)])
def test_each_saving_can_be_left_out(left_out: str) -> None:
    qmodel = trained(["conv", "relu", "gelu", "conv", "selects"])
    expected = step(qmodel, images())
    qmodel.accelerate(without=[left_out])
    found = step(qmodel, images())
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)
    kinds = {type(each).__name__ for each in qmodel.qat.fused.steps}  # type: ignore[union-attr]
    assert ("FusedReLU" in kinds) == (left_out != "relus")
    assert ("FusedActivation" in kinds) == (left_out != "activations")
    assert ("StackedQuantizers" in kinds) == (left_out not in ("joined_selects", "stacked_quantizers"))


def test_a_saving_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match=r"without='relu'\): give a list of names out of fused_layers, first_layer"):
        ready("lsq").accelerate(without=["relu"])


def test_every_reason_is_one_sentence() -> None:
    assert all(reason[0].islower() and not reason.endswith(".") for reason in REASONS)
