"""Models that attend by our kernel for one token: the logits and tokens of transformers' own attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebit.kernels.token_attention import takes
from sparsebit.llm.layers import token_attention
from tests.llm.tiny_models import saved, tiny_model

TOKENS = torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 4, 5]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of queries that our operator computes; on a CPU it is its definition."""
    shapes: list[torch.Size] = []

    def computed(query: Tensor, *rest: Any) -> Tensor:
        shapes.append(query.shape)
        found: Tensor = torch.ops.sparsebit.token_attention(query, *rest)
        return found

    def takes(query: Tensor, *_: Any) -> bool:
        return query.shape[2] == 1

    monkeypatch.setattr(token_attention, "token_attention", computed)
    monkeypatch.setattr(token_attention, "takes", takes)
    return shapes


def generated(model: Any, **options: Any) -> Any:
    return model.generate(
        TOKENS,
        attention_mask=MASK,
        max_new_tokens=6,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text", "mistral"])
def test_generated_tokens_are_those_of_transformers(calls: list[torch.Size], kind: str, cache: str | None) -> None:
    torch.manual_seed(0)
    model = tiny_model(kind).eval()
    options = {} if cache is None else {"cache_implementation": cache, "disable_compile": True}
    plain = generated(model, **options)
    assert not calls
    assert token_attention.use_token_attention(model)
    found = generated(model, **options)
    assert calls and all(shape[2] == 1 for shape in calls)
    assert torch.equal(found.sequences, plain.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(plain.logits), rtol=1e-4, atol=1e-4)


def test_without_a_mask_transformers_computes(calls: list[torch.Size]) -> None:
    model = tiny_model().eval()
    token_attention.use_token_attention(model)
    model(TOKENS[:1, :1])
    assert not calls


def test_training_and_unknown_arguments_are_left_to_transformers(calls: list[torch.Size]) -> None:
    model = tiny_model()
    token_attention.use_token_attention(model)
    attention = model.model.layers[0].self_attn
    query, mask = torch.randn(1, 4, 1, 16), torch.ones(1, 1, 1, 3, dtype=torch.bool)
    key = value = torch.randn(1, 2, 3, 16)
    for options in ({"dropout": 0.5}, {"position_bias": torch.zeros(1, 4, 1, 3)}):
        token_attention._attention(attention, query, key, value, mask, **options)
    assert not calls
    token_attention._attention(attention, query, key, value, mask, sliding_window=4, output_attentions=False)
    assert calls


def test_other_ways_of_attention_stay() -> None:
    model = tiny_model()
    model.set_attn_implementation("eager")
    assert not token_attention.use_token_attention(model)
    assert model.config._attn_implementation == "eager"


def test_the_wiring_compiles_into_one_graph() -> None:
    model = tiny_model().eval()
    assert token_attention.use_token_attention(model)
    attention = model.model.layers[0].self_attn
    query, mask = torch.randn(1, 4, 1, 16), torch.ones(1, 1, 1, 3, dtype=torch.bool)
    key = value = torch.randn(1, 2, 3, 16)

    @torch.compile(fullgraph=True, backend="eager")
    def step(query: Tensor) -> Tensor:
        assert not takes(query, key, value, mask)
        found, _ = token_attention._attention(attention, query, key, value, mask, position_ids=mask)
        return found

    plain, _ = token_attention._attention(attention, query, key, value, mask)
    torch.testing.assert_close(step(query), plain)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The CUDA Graph is empty")  # inductor itself
def test_a_loaded_model_generates_compiled_what_it_generates_plain(tmp_path: Path) -> None:
    from sparsebit.llm import compiled_settings, load

    folder = saved(tiny_model(hidden_size=256, head_dim=64), tmp_path / "model")
    model = load(folder, device="cuda", dtype=torch.float32)
    assert model.config._attn_implementation == token_attention.NAME
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    given = {"inputs": TOKENS.cuda(), "attention_mask": MASK.cuda()}
    compiled = model.generate(**given, **options, **compiled_settings(model))
    model.set_attn_implementation("sdpa")
    assert torch.equal(compiled, model.generate(**given, **options))
