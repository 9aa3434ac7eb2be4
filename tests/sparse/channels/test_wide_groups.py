"""Channels that leave layers but not activations: the smaller model is the masked one, and says so in the report."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import sparsebit
from sparsebit.sparse import SparseModel, load, save
from sparsebit.sparse.budgets.model_size import model_size
from sparsebit.sparse.group_search import find_groups
from tests.parameters import first_fast
from tests.sparse.nets import WIDE, NormOverHidden, WidthOfInput, rows

HALF = {"DEVICE": "cpu", "SPARSER": {"TYPE": "structured", "RATIO": 0.5}}


def pruned(model: nn.Module, batch: torch.Tensor) -> tuple[SparseModel, nn.Module]:
    smodel = SparseModel(model.eval(), HALF, batch).eval()
    smodel.calc_params()
    return smodel, smodel.shrink()


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", WIDE)
def test_layers_lose_channels_that_activations_keep(name: str, tmp_path: Path) -> None:
    build, words = WIDE[name]
    model, batch = build()
    found = find_groups(model.eval(), batch)
    lines = [line for line in str(found).splitlines() if "a.weight[0]" in line]
    assert len(lines) == 1 and "only layers lose them" in lines[0] and words in lines[0]
    assert not any((entry.tensor, entry.dim) == ("a.weight", 0) for entry in found.spared)
    smodel, small = pruned(model, batch)
    other = torch.randn_like(batch)
    assert type(small) is type(model)
    assert torch.allclose(small(other), smodel(other), atol=1e-6)
    assert small.a.weight.shape[0] == model.a.weight.shape[0] // 2
    assert model_size(small, batch).macs < 0.8 * model_size(model, batch).macs
    save(small, tmp_path / "small")
    assert torch.equal(load(tmp_path / "small", build()[0]).eval()(other), small(other))


def test_layers_tell_both_widths() -> None:
    _, small = pruned(NormOverHidden(), rows())
    assert small.a.out_features == 10 and small.b.in_features == 10  # as code around sees them
    assert "computes=5" in repr(small.a) and "reads=5" in repr(small.b)
    assert set(small.state_dict()) == set(NormOverHidden().state_dict())


def test_heads_are_still_heads() -> None:
    found = find_groups(WidthOfInput().eval(), torch.randn(2, 5, 12))
    assert [(len(group.units), found.kind_of(group)) for group in found.groups] == [(4, "head")]


class TalkingHeads(WidthOfInput):
    """Heads are mixed between the product and its softmax, so that a layer writes heads after another has read some."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.a(x).reshape(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        scores = self.mix((query @ key.transpose(-2, -1)).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.b((scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, width))


class Normalized(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


@pytest.mark.parametrize("kind", first_fast([WidthOfInput, TalkingHeads]))
def test_blocks_of_one_class_fail_alike(kind: type[nn.Module]) -> None:
    model = nn.Sequential(*(Normalized(nn.LayerNorm(12), kind()) for _ in range(5))).eval()
    batch = torch.randn(2, 5, 12)
    found = find_groups(model, batch)
    assert [len(group.units) for group in found.groups if found.kind_of(group) == "head"] == [4] * 5
    reasons = [line.rpartition("not proved: ")[2] for line in str(found).splitlines() if "only layers" in line]
    assert {reason.split()[0] for reason in reasons} == {f"{number}.1" for number in range(5)}
    smodel, small = pruned(model, batch)
    assert torch.allclose(small(batch), smodel(batch), atol=1e-6)


def test_a_smaller_model_trains_and_can_be_quantized() -> None:
    _, small = pruned(NormOverHidden(), rows())
    small.train()(rows()).sum().backward()
    assert small.a.weight.grad is not None and small.a.weight.grad.shape == (5, 6)
    batches = [rows() for _ in range(4)]
    quantized = sparsebit.quantize(small.eval(), batches)
    assert quantized.coverage.num_weighted_quantized == 2


def test_a_smaller_model_can_be_pruned_again(tmp_path: Path) -> None:
    class Net(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(6, 12), nn.ReLU(), NormOverHidden12())

    _, once = pruned(Net(), rows())
    again, twice = pruned(once, rows())
    assert twice[0].out_features == 3 and twice[2].a.weight.shape == (5, 3)
    save(twice, tmp_path / "small")
    x = rows()
    assert torch.allclose(twice(x), again(x), atol=1e-6)
    assert torch.equal(load(tmp_path / "small", Net()).eval()(x), twice(x))


class NormOverHidden12(NormOverHidden):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(12, 10)


def test_a_weight_that_code_reads_elsewhere_stays() -> None:
    class Reads(NormOverHidden):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + nn.functional.linear(x, self.a.weight).mean()

    model = Reads().eval()
    smodel, small = pruned(model, rows())
    x = rows()
    assert torch.allclose(small(x), smodel(x), atol=1e-6)
