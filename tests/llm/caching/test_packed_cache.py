"""A packed cache in transformers' models: one call equals many, `generate` uses it, nothing else changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebit.errors import ConfigError
from sparsebit.llm.caching.cache_kinds import CACHE_KINDS, CALIBRATED, LARGEST, CacheKind
from sparsebit.llm.caching.cache_ranges import cache_ranges
from sparsebit.llm.caching.packed_cache import (
    LayerCodes,
    cache_bytes,
    drop_packed_cache,
    need_packable,
    packed_cache_kind,
    use_packed_cache,
)
from sparsebit.llm.caching.row_codes import RowCodes
from tests.llm.tiny_models import tiny_model
from tests.parameters import first_fast

TOKENS = torch.randint(3, 90, (2, 24), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(TOKENS)


def packed(model: Any, kind: CacheKind) -> Any:
    """The model with a packed cache, calibrated on the tokens of the test."""
    drop_packed_cache(model)
    ranges = cache_ranges(model, TOKENS)

    def codes(largest: Tensor) -> RowCodes:
        return RowCodes(kind, largest.reshape(-1, 1, 1) / LARGEST[kind] if kind in CALIBRATED else None)

    use_packed_cache(
        model, {number: LayerCodes(codes(keys), codes(values)) for number, (keys, values) in ranges.items()}
    )
    return model


@torch.no_grad()
def at_once(model: Any) -> Tensor:
    found: Tensor = model(TOKENS, use_cache=False).logits
    return found


@torch.no_grad()
def one_by_one(model: Any, past: Any = None) -> Tensor:
    found = []
    for token in TOKENS.split(1, dim=1):
        output = model(token, past_key_values=past, use_cache=True)
        past = output.past_key_values
        found.append(output.logits)
    return torch.cat(found, 1)


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(
    "model_type",
    first_fast(
        ["llama", "mistral", "opt", "gemma3_text", "gpt2", "qwen3", "phi3", "falcon", "mixtral", "gpt_neox", "bloom"], 3
    ),
)
@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_one_call_equals_one_for_each_token(model_type: str, kind: CacheKind) -> None:
    model = tiny_model(model_type)
    exact = at_once(model)
    found = at_once(packed(model, kind))
    assert 1e-4 < distance(found, exact) < 0.8  # the cache is used, and is near
    # A number at the border of two codes may round to either side, which changes the logits of all later tokens.
    steps = one_by_one(model)
    assert float(((steps - found).abs() / found.abs().max() < 1e-5).float().mean()) > 0.5
    assert distance(steps, found) < 0.05
    drop_packed_cache(model)
    assert torch.equal(at_once(model), exact)


def test_eight_bits_are_near_float() -> None:
    model = tiny_model()
    exact = at_once(model)
    assert distance(at_once(packed(model, "int8")), exact) < distance(at_once(packed(model, "fp8")), exact) < 0.15


def test_bytes() -> None:
    model = tiny_model(head_dim=64)
    with torch.no_grad():
        numbers = cache_bytes(model(TOKENS, use_cache=True).past_key_values)
        found = {kind: cache_bytes(packed(model, kind)(TOKENS, use_cache=True).past_key_values) for kind in CACHE_KINDS}
    assert {kind: 2 * size / numbers for kind, size in found.items()} == {"int8": 0.5, "fp8": 0.5, "int4": 0.28125}


@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_generate(kind: CacheKind) -> None:
    from transformers import DynamicCache

    model = packed(tiny_model(), kind)
    how: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    grown = model.generate(TOKENS, **how)
    past = DynamicCache(config=model.config)
    assert torch.equal(model.generate(TOKENS, past_key_values=past, **how), grown)
    assert {layer.keys.dtype for layer in past.layers} == {torch.uint8}
    fixed = model.generate(TOKENS, cache_implementation="static", disable_compile=True, **how)
    assert torch.equal(fixed, grown)
    assert model.generate(TOKENS, num_beams=3, **how).shape == grown.shape


def test_beams_and_cropping_move_the_rows() -> None:
    from transformers import DynamicCache

    model, past = packed(tiny_model(), "int4"), DynamicCache()
    with torch.no_grad():
        expected = model(TOKENS[:, :12]).logits[:, -1]
        model(TOKENS, past_key_values=past, use_cache=True)
        past.crop(-13)
        past.reorder_cache(torch.tensor([1, 0]))
        found = model(TOKENS[:, 11:12].flip(0), past_key_values=past, use_cache=True).logits[:, -1]
    assert distance(found.flip(0), expected) < 1e-5


def test_sequences_of_different_lengths() -> None:
    model = packed(tiny_model(), "int8")
    mask = MASK.clone()
    mask[0, :5] = 0
    with torch.no_grad():
        alone = model(TOKENS[:1, 5:]).logits
        padded = model(TOKENS, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits[:1, 5:]
    assert distance(padded, alone) < 1e-3


def test_gradients_pass_to_the_numbers_before_rounding() -> None:
    model = tiny_model().requires_grad_(False)
    embedded = model.get_input_embeddings()(TOKENS).detach()

    def gradient() -> Tensor:
        given = embedded.clone().requires_grad_()
        model(inputs_embeds=given).logits.square().sum().backward()
        assert given.grad is not None
        return given.grad

    exact = gradient()
    packed(model, "int8")
    assert torch.nn.functional.cosine_similarity(gradient().flatten(), exact.flatten(), dim=0) > 0.99


def test_training_computes_in_float() -> None:
    model = tiny_model(attention_dropout=0.0)
    exact = at_once(model)
    assert torch.equal(at_once(packed(model, "int4").train()), exact)


def test_copies_keep_it() -> None:
    model = packed(tiny_model(), "int4")
    copied = copy.deepcopy(model)
    assert packed_cache_kind(copied) == "int4"
    assert torch.equal(at_once(copied), at_once(model))


def test_a_float_cache_that_is_not_empty() -> None:
    model = tiny_model()
    with torch.no_grad():
        past = model(TOKENS, use_cache=True).past_key_values
        with pytest.raises(ConfigError, match="layer 0 of past_key_values holds float keys and values already"):
            packed(model, "int4")(TOKENS[:, :1], past_key_values=past)


def test_caches_and_models_that_cannot_be_packed() -> None:
    model = packed(tiny_model(), "int4")
    wanted: dict[str, Any] = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    with pytest.raises(ConfigError, match="is a Fp8QuantizedLayer, which cannot be packed"):
        model.generate(TOKENS, attention_mask=MASK, max_new_tokens=2, pad_token_id=0, **wanted)
    with pytest.raises(ConfigError, match="of the class tuple"), torch.no_grad():
        model(TOKENS, past_key_values=((),))
    codes = dict.fromkeys(range(3), LayerCodes(RowCodes("int4"), RowCodes("int4")))
    with pytest.raises(ConfigError, match="MambaForCausalLM takes no past_key_values"):
        use_packed_cache(tiny_model("mamba"), codes)
    with pytest.raises(ConfigError, match="heads of 20 numbers"):
        need_packable(tiny_model(head_dim=20), codes)


def test_a_decoder_that_ignores_its_cache() -> None:
    model = packed(tiny_model(), "int4")
    for layer in model.model.layers:
        forward = layer.self_attn.forward
        layer.self_attn.forward = lambda *args, past_key_values=None, forward=forward, **more: forward(*args, **more)
    with pytest.raises(ConfigError, match="LlamaModel does not use the past_key_values that it is given"):
        at_once(model)
