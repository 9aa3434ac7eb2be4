"""Which weights unstructured sparsity prunes, and that what it leaves alone is named and counted."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

from sparsebit.errors import ConfigError
from sparsebit.sparse import SparseModel, SparseOpr, find_groups, load, register_smodule, save
from sparsebit.sparse.selecting.element_weights import find_element_weights
from sparsebit.sparse.shrinking.surgery import apply_plan
from sparsebit.sparse.sparsers import SMODULE_MAP
from tests.sparse.nets import rows


def pruned(model: nn.Module, ratio: float = 0.9, **options: object) -> SparseModel:
    smodel = SparseModel(
        model, {"DEVICE": "cpu", "SPARSER": {"TYPE": "unstructured", "STRATEGY": "l1norm", "RATIO": ratio, **options}}
    )
    smodel.calc_params()
    return smodel


def true_ratio(smodel: SparseModel) -> float:
    """The share of zeros in all parameters with rows and columns of the model as it runs."""
    weights = [p for p in smodel.masked_model().parameters() if sum(size > 1 for size in p.shape) > 1]
    return sum(int((p == 0).sum()) for p in weights) / sum(p.numel() for p in weights)


def old_weight_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return weight_norm(layer)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(8, 8, 2, bidirectional=True, proj_size=4),
    "gru": lambda: nn.GRU(8, 8),
    "rnn": lambda: nn.RNN(8, 8),
    "lstm cell": lambda: nn.LSTMCell(8, 8),
    "gru cell": lambda: nn.GRUCell(8, 8),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "attention of other widths": lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=5),
    "bilinear": lambda: nn.Bilinear(6, 5, 8),
    "transposed convolution": lambda: nn.ConvTranspose2d(4, 6, 3),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(8, 8)),
    "old weight norm": lambda: old_weight_norm(nn.Conv2d(4, 6, 3)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(8, 8)),
    "old spectral norm": lambda: spectral_norm(nn.Linear(8, 8)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(8, 8)),
    "torch's pruning": lambda: prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.25),
    "weight norm of an lstm": lambda: parametrizations.weight_norm(nn.LSTM(8, 8), "weight_hh_l0"),
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 12),
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_layers_of_torch_are_pruned_as_asked(layer: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    smodel = pruned(nn.Sequential(layer(), nn.LayerNorm(8)))
    assert abs(smodel.zeros.ratio - 0.9) < 0.01 and smodel.zeros.ratio == pytest.approx(true_ratio(smodel))
    assert not smodel.zeros.left_alone


class OwnLinear(nn.Module):
    """As the `Conv1D` of transformers: a class of its own, whose weight is called so."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Mixed(nn.Module):
    """Tables, positions and stacked experts, of which no one knows whether zeros help."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.own, self.head = nn.Embedding(11, 6), OwnLinear(), nn.Linear(8, 3)
        self.positions, self.token = nn.Parameter(torch.randn(1, 4, 6)), nn.Parameter(torch.randn(1, 1, 6))
        self.experts, self.scale = nn.Parameter(torch.randn(2, 8, 8)), nn.Parameter(torch.randn(1, 8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.own(self.table(x) + self.positions + self.token)
        return self.head(torch.einsum("btc,ecd->btd", x, self.experts) * self.scale[:, :, 0, 0])


def test_what_is_left_alone_is_named_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="sparsebit"):
        smodel = pruned(Mixed())
    zeros = smodel.zeros
    assert set(zeros.left_alone) == {"table.weight", "positions", "experts"}
    assert zeros.num_weights == 11 * 6 + 6 * 8 + 8 * 3 + 4 * 6 + 2 * 8 * 8
    assert zeros.ratio == pytest.approx(true_ratio(smodel)) and zeros.ratio < 0.3
    assert smodel.sparsity["own.weight"] == pytest.approx(0.9, abs=0.01) and smodel.sparsity["experts"] == 0
    for text in ("experts: a parameter of Mixed; register_smodule", "table.weight: a table", f"({zeros.ratio:.3f})"):
        assert text in caplog.text


def test_own_parameters_are_pruned_where_they_are_registered() -> None:
    @register_smodule(sources=[Mixed])
    class SMixed(SparseOpr):
        weights = ("experts",)

    try:
        smodel = pruned(Mixed())
    finally:
        del SMODULE_MAP[Mixed]
    assert "experts" not in smodel.zeros.left_alone and smodel.sparsity["experts"] == pytest.approx(0.9, abs=0.01)


class TiedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=False)
        self.unused = nn.Linear(6, 4)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.body(self.embed(x))))


@pytest.mark.parametrize("strategy", ["l1norm", "wanda", "obs", "sparsegpt", "taylor", "apoz"])
def test_tied_weights_have_one_mask(strategy: str) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 11, (4, 5))
    config = {"DEVICE": "cpu", "SPARSER": {"TYPE": "unstructured", "STRATEGY": strategy, "RATIO": 0.5}}
    smodel = SparseModel(TiedHead(), config)
    smodel.calc_params([tokens], lambda outputs, _: outputs.square().mean())
    assert list(smodel.masks) == ["embed.weight", "body.weight", "unused.weight"]
    assert smodel.model.head.weight is smodel.model.embed.weight
    assert float((smodel.model.head.weight == 0).float().mean()) == 0.5
    smodel(tokens).square().mean().backward()
    assert not smodel.model.embed.weight.grad[~smodel.masks["embed.weight"]].any()
    plain = smodel.masked_model()
    assert plain.head.weight is plain.embed.weight and torch.equal(plain(tokens), smodel(tokens))
    # A layer that no batch reaches: criteria of data cannot judge it, and say so.
    reason = smodel.zeros.left_alone.get("unused.weight", "")
    assert ("no batch reaches it" in reason) == (strategy in ("wanda", "obs", "sparsegpt", "apoz"))


@pytest.mark.parametrize("name", ["embed", "head"])
def test_a_tied_weight_is_spared_by_either_name(name: str) -> None:
    smodel = pruned(TiedHead(), SPARE=[name])
    assert smodel.sparsity["embed.weight"] == 0 and smodel.sparsity["body.weight"] > 0.8
    smodel = pruned(TiedHead(), SPECIFIC=[{name: ["RATIO", 0.25]}])
    assert smodel.sparsity["embed.weight"] == pytest.approx(0.25, abs=0.01)


def test_attention_is_not_judged_by_inputs_that_no_layer_sees() -> None:
    """Its output projection is not called as a layer, so that the norms of its inputs would all be zero."""
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    config = {"DEVICE": "cpu", "SPARSER": {"TYPE": "unstructured", "STRATEGY": "wanda", "RATIO": 0.5}}
    smodel = SparseModel(layer, config)
    smodel.calc_params([torch.randn(2, 5, 8)])
    assert set(smodel.zeros.left_alone) == {"self_attn.in_proj_weight", "self_attn.out_proj.weight"}
    assert smodel.zeros.ratio == pytest.approx(true_ratio(smodel))
    with pytest.raises(ConfigError, match="slimming does not judge"):
        pruned(nn.LSTM(4, 4), STRATEGY="slimming")


def test_a_spared_layer_keeps_its_parametrization() -> None:
    model = nn.Sequential(*(parametrizations.weight_norm(nn.Linear(6, 6)) for _ in range(2)))
    smodel = pruned(model, SPARE=["0"])
    assert parametrize.is_parametrized(smodel.model[0]) and not parametrize.is_parametrized(smodel.model[1])
    assert parametrize.is_parametrized(model[1]) and model[1].weight.shape == (6, 6)  # copies share its class
    zeros = smodel.zeros
    assert zeros.ratio == pytest.approx(zeros.num_zeros / (2 * 36)) and "0.parametrizations.weight.original1" in str(
        zeros
    )


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = parametrizations.weight_norm(nn.Linear(6, 8))
        self.b = parametrizations.weight_norm(nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(x)))


def test_channels_leave_layers_with_weight_norm(tmp_path: object) -> None:
    torch.manual_seed(0)
    model, batch = Normed().eval(), rows()
    before = model.state_dict()
    smodel = SparseModel(model, {"DEVICE": "cpu", "SPARSER": {"RATIO": 0.5}}, batch).eval()
    assert torch.allclose(smodel(batch), model(batch), atol=1e-6)
    assert len(smodel.groups.units) == 8
    smodel.calc_params()
    smodel.reconstruct([batch])
    small = smodel.shrink()
    assert small.a.out_features == 4 and torch.allclose(small(batch), smodel(batch), atol=1e-6)
    torch.save(small, f"{tmp_path}/small.pt")  # weight norm itself cannot be pickled
    save(small, f"{tmp_path}/small")
    assert torch.equal(load(f"{tmp_path}/small", Normed()).eval()(batch), small(batch))
    smodel.rewind(before)
    kept = smodel.masks["a.weight"]
    assert torch.allclose(smodel.model.a.weight[kept], model.a.weight[kept])
    found = find_groups(model, batch)  # without a SparseModel, the plan folds the layers
    apply_plan(model, found.plan(found.units[:4]))
    assert len(found.units) == 8 and model.a.out_features == 4 and model(batch).shape == (4, 3)


def test_weights_are_named_once() -> None:
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": shared, "b": shared, "norm": nn.LayerNorm((4, 4)), "batch": nn.BatchNorm2d(4)})
    found = find_element_weights(model)
    assert found.layers == {"a.weight": ("a", "b")} and not found.left_alone


@pytest.mark.parametrize(
    ("granularity", "reason"), [("2:4", "takes 4 columns, and it has 3"), ("16x8", "whole weight")]
)
def test_weights_that_are_smaller_than_what_goes_at_once(granularity: str, reason: str) -> None:
    options: dict[str, object] = {"GRANULARITY": granularity} | ({} if ":" in granularity else {"RATIO": 0.5})
    config = {"DEVICE": "cpu", "SPARSER": {"TYPE": "unstructured", **options}}
    smodel = SparseModel(nn.Sequential(nn.Linear(3, 32), nn.Linear(32, 8), nn.Linear(3, 8)), config)
    smodel.calc_params()
    assert reason in smodel.zeros.left_alone["2.weight"] and smodel.sparsity["1.weight"] == 0.5
    with pytest.raises(ConfigError, match=r"no weight of the model is large enough; 0\.weight"):
        SparseModel(nn.Sequential(nn.Linear(3, 8)), config).calc_params()
