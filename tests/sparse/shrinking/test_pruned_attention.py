"""Heads of `nn.MultiheadAttention` can be removed: in every form of its call the small one is the masked one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsebit
from sparsebit.sparse import SparseModel, find_groups, load, save
from sparsebit.sparse.proof.bench import mask_units
from sparsebit.sparse.shrinking.pruned_attention import PrunedMultiheadAttention
from sparsebit.sparse.shrinking.surgery import apply_plan

HIDDEN = torch.tensor([[False] * 5, [False, False, False, True, True]])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)


class Attends(nn.Module):
    """One attention: of x to itself, to another input, or to two."""

    def __init__(self, options: dict[str, Any], call: dict[str, Any], kind: str) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 4, **options)
        self.call, self.kind = call, kind
        self.other, self.third = nn.Linear(12, options.get("kdim", 12)), nn.Linear(12, options.get("vdim", 12))

    def forward(self, x: Tensor) -> Any:
        if self.kind == "itself":
            return self.attention(x, x, x, **self.call)
        other = self.other(x)
        return self.attention(x, other, other if self.kind == "another" else self.third(x), **self.call)


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "weights": ({"batch_first": True}, {"average_attn_weights": True}, "itself"),
    "no weights": ({"batch_first": True}, {"need_weights": False}, "itself"),
    "length first": ({}, {"need_weights": False}, "itself"),
    "no bias": ({"bias": False}, {}, "itself"),
    "another": ({"batch_first": True}, {}, "another"),
    "two others": ({}, {"need_weights": False}, "two others"),
    "own widths": ({"kdim": 7, "vdim": 5, "batch_first": True}, {}, "two others"),
    "more keys": ({"add_bias_kv": True, "add_zero_attn": True}, {"need_weights": False}, "itself"),
    "padding": ({"batch_first": True}, {"key_padding_mask": HIDDEN, "need_weights": False}, "itself"),
    "padding and mask": ({"batch_first": True}, {"key_padding_mask": HIDDEN, "attn_mask": CAUSAL == 0}, "another"),
    "causal": ({"batch_first": True}, {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False}, "itself"),
    "causal weights": ({"batch_first": True}, {"attn_mask": CAUSAL, "is_causal": True}, "itself"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("form", FORMS)
def test_heads_go_in_every_form(form: str) -> None:
    options, call, kind = FORMS[form]
    torch.manual_seed(0)
    model = Attends(options, call, kind).eval()
    if form == "padding and mask":
        model.call = {**call, "attn_mask": torch.eye(5, dtype=torch.bool).roll(1, 0)}
    # The mean of the weights over the heads is another one with fewer heads: where it is returned, they stay.
    returns_weights = call.get("need_weights", True)
    model = First(model) if returns_weights else model
    batch = torch.randn(2, 5, 12) if options.get("batch_first") else torch.randn(5, 2, 12)
    found = find_groups(model, batch)
    heads = [group for group in found.groups if len(group.units) == 4]
    assert len(heads) == 1, str(found)
    for dead in (heads[0].units[:1], heads[0].units[1:]):
        masked, small = copy.deepcopy(model), copy.deepcopy(model)
        mask_units(masked, dead)
        apply_plan(small, found.plan(dead))
        attention = next(m for m in small.modules() if isinstance(m, nn.MultiheadAttention))
        assert type(attention) is PrunedMultiheadAttention and attention.num_heads == 4 - len(dead)
        for x in (batch, torch.randn_like(batch)):
            one, other = masked(x), small(x)
            one, other = (one, other) if returns_weights else (one[0], other[0])
            assert torch.allclose(one, other, atol=1e-6)


class First(nn.Module):
    """The output without the weights of the heads."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


def test_returned_weights_of_heads_are_as_those_of_torch() -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(12, 4)
    twin = copy.deepcopy(attention)
    twin.__class__ = PrunedMultiheadAttention
    x, y = torch.randn(5, 2, 12), torch.randn(3, 2, 12)
    for average in (True, False):
        for query, key in ((x, y), (x[:, 0], y[:, 0])):
            for one, other in zip(
                attention(query, key, key, average_attn_weights=average),
                twin(query, key, key, average_attn_weights=average),
                strict=True,
            ):
                assert torch.allclose(one, other, atol=1e-6)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(12, 4, 20, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


CONFIG = {"DEVICE": "cpu", "SPARSER": {"TYPE": "structured", "RATIO": 0.5}}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_of_torch_becomes_smaller_and_is_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batch = torch.randn(2, 5, 12)
    smodel = SparseModel(encoder(), CONFIG, batch).eval()
    smodel.calc_params()
    small = smodel.shrink().eval()
    assert [layer.self_attn.num_heads for layer in small.layers] == [2, 2]
    assert [layer.linear1.out_features for layer in small.layers] == [10, 10]
    masked = smodel.masked_model().eval()
    with torch.no_grad():  # torch's fused kernels are for this mode
        assert torch.allclose(small(batch), masked(batch), atol=1e-5)
        padded = [m(batch, src_key_padding_mask=HIDDEN) for m in (small, masked)]
        assert torch.allclose(*padded, atol=1e-5)
    save(small, tmp_path / "small")
    again = load(tmp_path / "small", encoder()).eval()
    assert torch.equal(again(batch), small(batch))
    small.train()(batch).sum().backward()


def test_a_pruned_attention_is_quantized_like_any_other() -> None:
    torch.manual_seed(0)
    batch = torch.randn(2, 5, 12)
    smodel = SparseModel(encoder(), CONFIG, batch).eval()
    smodel.calc_params()
    small = smodel.shrink().eval()
    qmodel = sparsebit.quantize(small, [batch])
    assert qmodel.coverage.num_weighted_quantized == qmodel.coverage.num_weighted == 2 * 6
    qmodel.set_quant(w_quant=False, a_quant=False)
    assert torch.allclose(qmodel(batch), small(batch), atol=1e-5)
