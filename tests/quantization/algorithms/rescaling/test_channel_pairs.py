"""Which layers share channels: found from the graph, through whatever moves them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparsebit
from sparsebit.quantization.algorithms.rescaling.channel_pairs_scaling import float_runs

CONFIG = "{BACKEND: virtual, DEVICE: cpu, W: {QUANTIZER: {BIT: 8}}, A: {QUANTIZER: {BIT: 8}}}"


def pairs_of(model, *shape, config=CONFIG):
    torch.manual_seed(0)
    data = [torch.randn(2, *shape)]
    qmodel = sparsebit.quantize(model.eval(), data, config)
    with float_runs(qmodel, data, verb="test", asym=False, memory_budget=1 << 20) as runs:
        return {pair.name: pair for pair in runs.pairs()}


def readers(pair):
    return [reader.name for reader in pair.readers]


class Attention(nn.Module):
    """Heads of a fused projection, or of three; scores written out, or torch's own function."""

    def __init__(self, fused, written_out):
        super().__init__()
        self.fused, self.written_out = fused, written_out
        self.norm = nn.LayerNorm(8)
        if fused:
            self.qkv = nn.Linear(8, 24)
        else:
            self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.proj = nn.Linear(8, 8)

    def forward(self, x):
        h = self.norm(x)
        parts = self.qkv(h).chunk(3, -1) if self.fused else (self.q(h), self.k(h), self.v(h))
        q, k, v = (part.view(part.shape[0], -1, 2, 4).transpose(1, 2) for part in parts)
        if self.written_out:
            y = (q @ k.transpose(-2, -1) * 0.5).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        return x + self.proj(y.transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize("written_out", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_values_of_attention_are_followed_through_the_heads(fused, written_out):
    pairs = pairs_of(Attention(fused, written_out), 5, 8)
    assert readers(pairs["norm"]) == (["qkv"] if fused else ["q", "k", "v"]) and bool(pairs["norm"].is_free.all())
    value = pairs["qkv" if fused else "v"]
    assert readers(value) == ["proj"]
    assert value.is_free.tolist() == ([False] * 16 + [True] * 8 if fused else [True] * 8)
    assert value.readers[0].channels.tolist() == list(range(16, 24) if fused else range(8))


class GroupedQueries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.v, self.proj = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 8)

    def forward(self, x):
        q, v = self.q(x), self.v(x).view(x.shape[0], -1, 2, 2).transpose(1, 2)
        v = v[:, :, None].expand(-1, -1, 2, -1, -1).reshape(x.shape[0], 4, -1, 2)
        return self.proj((q @ q.transpose(1, 2)).softmax(-1)[:, None].matmul(v).transpose(1, 2).reshape(x.shape))


def test_a_head_that_several_queries_share_is_one_channel():
    pair = pairs_of(GroupedQueries(), 5, 8)["v"]
    assert bool(pair.is_free.all()) and pair.readers[0].channels.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(6, 8)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


def test_a_gate_is_no_obstacle_for_the_other_factor():
    pairs = pairs_of(Gated(), 8)
    assert readers(pairs["up"]) == ["down"] and bool(pairs["up"].is_free.all())
    assert "gate" not in pairs


class Flattened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool, self.fc = nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Linear(16, 5)

    def forward(self, x):
        return self.fc(torch.flatten(self.pool(F.relu(self.conv(x))), 1))


def test_channels_can_be_told_behind_a_flatten():
    pair = pairs_of(Flattened(), 3, 6, 6)["conv"]
    assert pair.readers[0].channels.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4


class Rms(nn.Module):
    """A norm that is written out."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.RMSNorm(8), Rms(8)], ids=["layer", "rms", "written out"])
def test_norms_are_sources(norm):
    pairs = pairs_of(nn.Sequential(norm, nn.Linear(8, 4)), 8)
    (pair,) = pairs.values()
    assert readers(pair) == ["1"] and bool(pair.is_free.all())


def test_a_norm_without_a_scale_has_nothing_to_take_one():
    assert not pairs_of(nn.Sequential(nn.LayerNorm(8, elementwise_affine=False), nn.Linear(8, 4)), 8)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        return x + self.second(F.relu(x))


def test_a_residual_sum_holds_the_channels_and_says_so():
    pair = pairs_of(Residual(), 8)["first"]
    assert not pair.is_free.any() and "residual" in pair.reason


class OddCode(nn.ReLU):
    def forward(self, x):
        return super().forward(x - 1)


def twice(layer):
    return nn.Sequential(layer, nn.ReLU(), layer)


def tied():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 4))
    model[2].weight = model[0].weight
    return model


def hooked(place):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    model[place].register_forward_hook(lambda module, args, output: output + 1)
    return model


REFUSED = {
    "odd code": lambda: nn.Sequential(nn.Linear(8, 8), OddCode(), nn.Linear(8, 4)),
    "sigmoid": lambda: nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 4)),
    "gelu": lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)),
    "called twice": lambda: twice(nn.Linear(8, 8)),
    "tied": tied,
    "hook on the source": lambda: hooked(0),
    "hook between": lambda: hooked(1),
    "hook on the reader": lambda: hooked(2),
    "weight norm": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 4)
    ),
}


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_what_does_not_keep_a_scale_is_left_alone(make):
    pairs = pairs_of(make(), 8)
    assert "0" not in pairs or not pairs["0"].is_free.any()


@pytest.mark.parametrize(("make", "why"), [(lambda: hooked(2), "hook"), (tied, "several layers")])
def test_a_layer_that_must_not_change_is_told(make, why):
    model = make()
    if why == "several layers":
        model = nn.Sequential(nn.Linear(8, 8), *model)
    assert why in pairs_of(model, 8)["0"].reason
