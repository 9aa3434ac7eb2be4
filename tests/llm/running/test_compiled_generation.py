"""Generating with a compiled step and a static cache: the tokens of a plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sparsebit.llm import QuantLinear, compiled_settings
from sparsebit.llm.caching.packed_cache import LayerCodes, use_packed_cache
from sparsebit.llm.caching.row_codes import RowCodes
from sparsebit.llm.layers.packed_weight import PackedWeight
from sparsebit.llm.running import compiled_generation
from tests.llm.tiny_models import tiny_model

TOKENS = torch.arange(1, 6)[None]


def packed_model() -> Any:
    torch.manual_seed(0)
    model = tiny_model(hidden_size=64, intermediate_size=64, num_hidden_layers=1).eval().float()
    for name, part in list(model.model.layers.named_modules()):
        if isinstance(part, nn.Linear):
            shape = part.out_features, part.in_features
            codes = torch.randint(0, 16, shape, dtype=torch.uint8)
            packed = PackedWeight.from_codes(codes, torch.full((shape[0], shape[1] // 32), 0.02), None, 4)
            layer = QuantLinear(packed)
            layer.prepare()
            model.model.layers.set_submodule(name, layer)
    return model


def generated(model: Any, **settings: Any) -> torch.Tensor:
    found: torch.Tensor = model.generate(
        TOKENS, attention_mask=torch.ones_like(TOKENS), max_new_tokens=8, do_sample=False, pad_token_id=0, **settings
    )
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor itself
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("has_packed_cache", [False, True], ids=["float cache", "packed cache"])
def test_the_tokens_are_those_of_a_plain_loop(
    monkeypatch: pytest.MonkeyPatch, backend: str, has_packed_cache: bool
) -> None:
    model = packed_model()
    if has_packed_cache:
        use_packed_cache(model, {0: LayerCodes(RowCodes("int4"), RowCodes("int4"))})
    plain = generated(model)
    compiled: list[Any] = []

    def settings(model: Any) -> dict[str, Any]:
        found = compiled_settings(model)
        found["compile_config"].backend = backend
        return found

    monkeypatch.setattr(compiled_generation, "compiled_settings", settings)
    monkeypatch.setattr(torch, "compile", _counting(torch.compile, compiled))
    assert compiled_generation.compile_step(model, TOKENS, 8) > 0
    assert len(compiled) == 1
    assert torch.equal(generated(model, **settings(model)), plain)
    assert len(compiled) == 1  # and not once more


def _counting(compile_: Any, calls: list[Any]) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return compile_(*args, **kwargs)

    return counted
