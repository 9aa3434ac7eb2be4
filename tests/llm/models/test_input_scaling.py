"""Folds of scales: found by running a block, taken only where the block's output stays the same."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsebit.llm.models.input_scaling import find_fold, scale_readers, scale_source
from tests.llm.tiny_models import tiny_model

TOKENS = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(1))
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
# (model type, stage) -> the module that takes the scale
FOLDS: list[tuple[str, Sequence[str], str | None]] = [
    ("llama", QKV, "input_layernorm"),
    ("llama", ("self_attn.o_proj",), "self_attn.v_proj"),
    ("llama", ("mlp.gate_proj", "mlp.up_proj"), "post_attention_layernorm"),
    ("llama", ("mlp.down_proj",), "mlp.up_proj"),
    ("gemma3_text", QKV, "input_layernorm"),  # it multiplies by 1 + weight
    ("qwen2", ("self_attn.o_proj",), "self_attn.v_proj"),  # with a bias
    ("phi", (*QKV, "mlp.fc1"), "input_layernorm"),  # LayerNorm, with a bias
    ("phi", QKV, None),  # fc1 reads it too
    ("phi", ("mlp.fc2",), None),  # GELU is between
    ("opt", ("fc2",), "fc1"),  # ReLU is between
    ("phi3", ("mlp.down_proj",), None),  # gate and up are one layer
]


def block_of(model_type: str) -> tuple[nn.Module, Any]:
    model = tiny_model(model_type)
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == 3)

    def run(block: nn.Module) -> Tensor:
        before, found = layers[0], []
        layers[0] = block
        hook = block.register_forward_hook(lambda _, __, output: found.append(output))
        with torch.no_grad():
            model(TOKENS, use_cache=False)
        hook.remove()
        layers[0] = before
        return found[0][0] if isinstance(found[0], tuple) else found[0]

    return layers[0], run


@pytest.mark.parametrize(("model_type", "stage", "source"), FOLDS)
def test_where_a_scale_goes(model_type: str, stage: Sequence[str], source: str | None) -> None:
    block, run = block_of(model_type)
    expected = run(block)
    fold = find_fold(block, stage, run)
    assert (None if fold is None else fold.source) == source
    torch.testing.assert_close(run(block), expected, rtol=0, atol=0)  # nothing was changed by looking
    if fold is None:
        return
    scale = torch.rand(int(fold.owner.max()) + 1, generator=torch.Generator().manual_seed(2)) + 0.5
    changed = copy.deepcopy(block)
    scale_source(changed, fold, 1 / scale)
    assert (run(changed) - expected).abs().max() > 1e-3 * expected.abs().max()
    scale_readers(changed, stage, scale[fold.owner])
    torch.testing.assert_close(run(changed), expected, rtol=1e-4, atol=1e-4)


def test_heads_that_are_repeated_share_a_channel() -> None:
    block, run = block_of("llama")
    fold = find_fold(block, ("self_attn.o_proj",), run)
    assert fold is not None
    heads = torch.arange(32).view(2, 1, 16).expand(2, 2, 16)  # 2 heads of values for 4 of queries
    assert torch.equal(fold.owner, heads.flatten())


def test_what_chooses_experts_reads_the_norm_too() -> None:
    block, run = block_of("qwen3_moe")

    class Beside(nn.Module):
        """A layer beside the experts, which reads what the router reads."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.side = inner, nn.Linear(64, 64)

        def forward(self, hidden: Tensor) -> Tensor:
            return self.inner(hidden) + self.side(hidden)  # type: ignore[no-any-return]

    block.mlp = Beside(block.mlp)
    block.eval()
    for module in block.modules():
        if hasattr(module, "gate_up_proj"):
            del module.gate_up_proj, module.down_proj
            module.forward = lambda hidden, index, weights: hidden * weights.sum(-1, keepdim=True) + index.sum()
    assert find_fold(block, ("mlp.side",), run) is None
