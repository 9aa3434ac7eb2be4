"""Residual blocks: found by what they compute, removed as a whole, saved and loaded from the original class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.errors import CheckpointError, ConfigError
from sparsebit.sparse import ChannelPlan, SkippedBlock, SparseModel, find_residual_blocks, load, model_size, save
from sparsebit.sparse.shrinking.surgery import apply_plan


def config(**sparser: object) -> dict[str, object]:
    options = {"TYPE": "structured", "GRANULARITY": "residual_block", "RATIO": 0.5, **sparser}
    schedule = options.pop("SCHEDULE", {})
    return {"DEVICE": "cpu", "SPARSER": options, "SCHEDULE": schedule}


class Basic(nn.Module):
    """As in ResNets: a ReLU behind the addition, and a shortcut that changes the width where asked to."""

    def __init__(self, width: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.a, self.na = nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.b, self.nb = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.shortcut = nn.Conv2d(width, out, 1, stride) if (width, stride) != (out, 1) else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.nb(self.b(F.relu(self.na(self.a(x))))) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.one = nn.Sequential(Basic(8, 8), Basic(8, 8))
        self.two = nn.Sequential(Basic(8, 12, 2), Basic(12, 12), Basic(12, 12))
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(F.relu(self.stem(x)))).mean((2, 3)))


class Layer(nn.Module):
    """A transformer layer; `is_pre`: norms inside the branches. It is called with more than its input."""

    def __init__(self, is_pre: bool) -> None:
        super().__init__()
        self.is_pre, self.kind = is_pre, "full"
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.gain = nn.Parameter(torch.zeros(8))  # a layer scale as it starts: the block gives its input at first

    def forward(self, hidden: Tensor, *, mask: Tensor | None = None) -> Tensor:
        x = self.first(hidden) if self.is_pre else hidden
        x = hidden + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        if not self.is_pre:
            x = self.first(x)
        y = x + (1 + self.gain) * self.down(F.gelu(self.up(self.second(x) if self.is_pre else x)))
        return y if self.is_pre else self.second(y)


class Encoder(nn.Module):
    def __init__(self, is_pre: bool = True) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.layers = nn.ModuleList([Layer(is_pre) for _ in range(4)])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        mask = torch.zeros(x.shape[1], x.shape[1], dtype=torch.bool)
        for layer in self.layers:
            assert layer.kind == "full"
            x = layer(hidden=x, mask=mask)
        return self.head(x.mean(1))


class PostNorm(Encoder):
    """Norms stand behind the additions, as in BERT."""

    def __init__(self) -> None:
        super().__init__(is_pre=False)


class Reads(ResNet):
    """Code outside looks into the first block."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.one[0].a.weight.shape[0])


class Tied(nn.Module):
    """Two layers share a weight, so that zeros in one are zeros in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Block() for _ in range(3)])
        self.blocks[1].f.weight = self.blocks[2].f.weight

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(self.f(x))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Plain(nn.Module):
    """No residual blocks: layers of one width, a norm behind a layer, and one module that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.twice = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)), Tied.Block()
        self.b = nn.Sequential(nn.LayerNorm(6), nn.Dropout())

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(self.twice(self.b(self.a(x))))


def images() -> Tensor:
    return torch.randn(2, 3, 12, 12)


def names(model: nn.Module, batch: Tensor) -> list[str]:
    return [block.name for block in find_residual_blocks(model, batch).blocks]


def test_blocks_are_found_by_what_they_compute() -> None:
    assert names(ResNet(), images()) == ["one.0", "one.1", "two.1", "two.2"]  # two.0 changes the width
    assert names(Encoder(), torch.randn(2, 5, 4)) == [f"layers.{i}" for i in range(4)]
    assert names(PostNorm(), torch.randn(2, 5, 4)) == [f"layers.{i}" for i in range(4)]
    assert names(Plain(), torch.randn(2, 6)) == []


def test_what_cannot_be_removed_is_spared_with_a_reason() -> None:
    found = find_residual_blocks(Reads(), images())
    assert [block.name for block in found.blocks] == ["one.1", "two.1", "two.2"]
    assert [(entry.name, entry.reason) for entry in found.spared] == [
        ("one.0", "the model's code uses more of it than its output")
    ]
    assert "3 residual blocks" in str(found) and "spared  one.0: the model's code uses" in str(found)
    tied = find_residual_blocks(Tied(), torch.randn(2, 6))
    assert [block.name for block in tied.blocks] == ["blocks.0"]
    assert {entry.name for entry in tied.spared} == {"blocks.1", "blocks.2"}


@pytest.mark.parametrize(
    ("kind", "batch", "removed"),
    [(ResNet, images(), 2), (Encoder, torch.randn(2, 5, 4), 2), (PostNorm, torch.randn(2, 5, 4), 2)],
    ids=["resnet", "encoder", "norms behind additions"],
)
def test_a_shrunk_model_is_the_masked_one(kind: Any, batch: Tensor, removed: int, tmp_path: Path) -> None:
    dense = kind().eval()
    smodel = SparseModel(dense, config(), batch).eval()
    smodel.calc_params()
    gone = smodel.removed_blocks()
    assert len(gone) == removed
    for block in (block for block in smodel.blocks.blocks if block.name in gone):
        assert block.norms == (("first", "second") if kind is PostNorm else ())
        for name, parameter in smodel.model.get_submodule(block.name).named_parameters():
            assert bool(parameter.any()) == (name in [f"{norm}.weight" for norm in block.norms])
    small = smodel.shrink()
    assert type(small) is kind and all(isinstance(small.get_submodule(name), SkippedBlock) for name in gone)
    assert torch.allclose(small(batch), smodel(batch), atol=1e-5) and not torch.allclose(small(batch), dense(batch))
    before, after = model_size(dense, batch), model_size(small, batch)
    assert after.macs < 0.8 * before.macs and after.parameters < before.parameters
    again = load(save(small, tmp_path / "small"), kind()).eval()
    assert torch.equal(again(batch), small(batch)) and again.state_dict().keys() == small.state_dict().keys()
    small.train()(batch).sum().backward()


@pytest.mark.slow
def test_layers_of_bert_become_their_norms(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    options = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    settings = transformers.BertConfig(vocab_size=20, max_position_embeddings=16, **options)
    batch = {"input_ids": torch.randint(0, 20, (2, 6)), "attention_mask": torch.ones(2, 6, dtype=torch.long)}
    model = transformers.BertModel(settings).eval()
    smodel = SparseModel(model, config(RATIO=0.5), batch).eval()
    smodel.calc_params()
    assert "becomes its norms attention.output.LayerNorm, output.LayerNorm" in str(smodel.blocks)
    assert len(smodel.blocks.blocks) == 2 and len(smodel.removed_blocks()) == 1
    small = smodel.shrink()
    wanted, found = smodel(**batch).last_hidden_state, small(**batch).last_hidden_state
    assert torch.allclose(found, wanted, atol=1e-5)
    # Channels of what is left can go after it, and both together make the folder.
    both = SparseModel(small, {"DEVICE": "cpu", "SPARSER": {"TYPE": "structured", "RATIO": 0.5}}, batch).eval()
    both.calc_params()
    least = both.shrink()
    assert torch.allclose(least(**batch).last_hidden_state, both(**batch).last_hidden_state, atol=1e-5)
    again = load(save(least, tmp_path / "small"), transformers.BertModel(settings)).eval()
    assert torch.equal(again(**batch).last_hidden_state, least(**batch).last_hidden_state)


def test_the_least_important_go_first_and_names_are_respected() -> None:
    model = ResNet()
    with torch.no_grad():
        for parameter in model.two[1].parameters():
            parameter.mul_(0.01)
        for parameter in model.one[1].parameters():
            parameter.mul_(0.1)
    smodel = SparseModel(model, config(), images())
    smodel.calc_params()
    assert sorted(smodel.removed_blocks()) == ["one.1", "two.1"]
    smodel = SparseModel(model, config(SPARE=["two.1"], RATIO=0.34), images())
    smodel.calc_params()
    assert smodel.removed_blocks() == ["one.1"]
    smodel = SparseModel(model, config(RATIO=0.0, SPECIFIC=[{"two.*": ["RATIO", 0.5]}]), images())
    smodel.calc_params()
    assert smodel.removed_blocks() == ["two.1"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("strategy", ["l2norm", "slimming", "taylor", "wanda", "random"])
def test_criteria_judge_blocks(strategy: str) -> None:
    smodel = SparseModel(ResNet(), config(STRATEGY=strategy), images())
    smodel.calc_params([images()], lambda outputs, batch: outputs.square().mean())
    assert len(smodel.removed_blocks()) == 2


def test_steps_only_add_blocks_and_zeros_stay_in_training() -> None:
    torch.manual_seed(0)
    scheduled = config(RATIO=1.0, STRATEGY="random", SCHEDULE={"TYPE": "linear", "STEPS": 4})
    smodel = SparseModel(ResNet(), scheduled, images())
    optimizer = torch.optim.SGD(smodel.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    gone: set[str] = set()
    for step in range(1, 5):
        optimizer.zero_grad()
        smodel(images()).square().mean().backward()
        optimizer.step()
        smodel.calc_params()
        assert gone < set(smodel.removed_blocks()) and len(smodel.removed_blocks()) == step
        gone = set(smodel.removed_blocks())
    smodel(images()).square().mean().backward()
    optimizer.step()
    batch = images()
    assert torch.allclose(smodel.shrink().eval()(batch), smodel.eval()(batch), atol=1e-5)


def test_masks_of_blocks_are_in_the_state() -> None:
    smodel = SparseModel(ResNet(), config(), images())
    smodel.calc_params()
    other = SparseModel(ResNet(), config(), images())
    other.load_state_dict(smodel.state_dict())
    assert other.removed_blocks() == smodel.removed_blocks()


@pytest.mark.slow
def test_reconstruction_takes_up_what_blocks_gave() -> None:
    torch.manual_seed(1)
    dense = ResNet().eval()
    batches = [F.avg_pool2d(3 * torch.randn(16, 3, 12, 12), 3, 1, 1) for _ in range(4)]
    smodel = SparseModel(dense, config(RATIO=0.25), batches[0]).eval()
    smodel.calc_params()

    def error() -> float:
        with torch.no_grad():
            return sum(float((smodel(x) - dense(x)).square().mean()) for x in batches)

    before = error()
    smodel.reconstruct(batches)
    assert error() < before
    assert torch.allclose(smodel.shrink()(batches[0]), smodel(batches[0]), atol=1e-5)


def test_channels_of_a_model_without_blocks(tmp_path: Path) -> None:
    """First blocks go, then channels of what is left: one plan does both to the original class."""
    batch = images()
    smodel = SparseModel(ResNet().eval(), config(), batch).eval()
    smodel.calc_params()
    channels = {"DEVICE": "cpu", "SPARSER": {"TYPE": "structured", "RATIO": 0.4}}
    second = SparseModel(smodel.shrink(), channels, batch).eval()
    second.calc_params()
    small = second.shrink()
    again = load(save(small, tmp_path / "small"), ResNet()).eval()
    assert torch.equal(again(batch), small(batch)) and torch.allclose(small(batch), second(batch), atol=1e-5)
    assert model_size(small, batch).parameters < model_size(smodel.shrink(), batch).parameters


def test_wishes_that_blocks_cannot_meet_are_errors() -> None:
    smodel = SparseModel(ResNet(), config(), images())
    with pytest.raises(ConfigError, match="name the blocks that are to stay in SPARE"):
        smodel.disable_sparse_before_add()
    with pytest.raises(ConfigError, match="GRANULARITY=residual_block"):
        smodel.choose_ratios({"macs": 0.5}, [images()])
    with pytest.raises(ConfigError, match="TYPE: structured"):
        SparseModel(ResNet(), config(TYPE="unstructured"), images())
    with pytest.raises(CheckpointError, match=r"this one has no block two\.7"):
        apply_plan(ResNet(), ChannelPlan(skipped=("two.7",)))


def test_a_plan_without_blocks_is_read() -> None:
    """Folders of earlier versions."""
    assert ChannelPlan.from_json({"kept": {}, "attributes": {}}) == ChannelPlan()
    plan = ChannelPlan(skipped=("a.0", "a.1"))
    assert ChannelPlan.from_json(plan.to_json()) == plan


def test_inputs_that_are_never_negative_prove_nothing_for_others() -> None:
    """`relu(x + f(x))` gives images between 0 and 1 again, and no other ones."""
    model = nn.Sequential(Basic(3, 3), nn.Conv2d(3, 3, 1), nn.ReLU(), Basic(3, 3), nn.Flatten()).eval()
    found = find_residual_blocks(model, torch.rand(2, 3, 6, 6))
    assert [block.name for block in found.blocks] == ["3"]
    assert [(entry.name, entry.reason) for entry in found.spared] == [
        ("0", "the model returns other values without it")
    ]
