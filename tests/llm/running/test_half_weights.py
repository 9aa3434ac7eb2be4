"""Embeddings and the output layer stay in the half precision of the files, where activations may be rounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparsebit.llm import load, resident_bytes
from sparsebit.llm.running.loading import HalfEmbedding, HalfLinear
from tests.llm.tiny_models import tiny_model


def saved(folder: Path, dtype: torch.dtype, model_type: str = "llama", **options: Any) -> Path:
    tiny_model(model_type, **options).to(dtype).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_same_logits_in_less_memory(dtype: torch.dtype, tied: bool, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", dtype, tie_word_embeddings=tied)
    whole, half = load(folder), load(folder, activations="bfloat16")
    embedding, head = half.get_input_embeddings(), half.get_output_embeddings()
    assert type(embedding) is HalfEmbedding and type(head) is HalfLinear
    assert embedding.weight.dtype == head.weight.dtype == dtype
    assert (embedding.weight is head.weight) == tied
    saving = 2 * whole.get_input_embeddings().weight.numel() * (1 if tied else 2)
    assert resident_bytes(half) == resident_bytes(whole) - saving
    with torch.no_grad():
        many, one = torch.arange(3, 23).view(2, 10), torch.tensor([[7]])
        assert torch.equal(half(many).logits, whole(many).logits)  # many rows are multiplied in float32
        torch.testing.assert_close(half(one).logits, whole(one).logits, rtol=0.01, atol=0.01)
    assert half(one).logits.dtype == torch.float32
    assert set(half.state_dict()) == set(whole.state_dict())
    for other in (torch.bfloat16, torch.float32):
        assert half.to(other)(one).logits.dtype == other


def test_a_bias_and_blocks_of_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsebit.llm.running.loading._BLOCK", 64)
    torch.manual_seed(0)
    plain, half = nn.Linear(32, 21).half(), HalfLinear(32, 21).half()
    half.load_state_dict(plain.state_dict())
    for shape in ((2, 7, 32), (3, 32), (32,), (0, 32)):
        x = torch.randn(shape)
        torch.testing.assert_close(half(x), plain.float()(x), rtol=1e-2, atol=1e-2)


def test_float32_files_and_exact_activations_are_left_alone(tmp_path: Path) -> None:
    floats = load(saved(tmp_path / "floats", torch.float32), activations="bfloat16")
    exact = load(saved(tmp_path / "halves", torch.float16))
    for model in (floats, exact):
        assert type(model.get_input_embeddings()) is nn.Embedding
        assert model.get_output_embeddings().weight.dtype == torch.float32


def test_embeddings_of_another_class_are_left_alone(tmp_path: Path) -> None:
    model = load(saved(tmp_path / "model", torch.bfloat16, "gemma3_text"), activations="bfloat16")
    assert not isinstance(model.get_input_embeddings(), HalfEmbedding)  # it scales its outputs
    assert type(model.get_output_embeddings()) is nn.Linear  # tied to it
    with torch.no_grad():
        assert model(torch.tensor([[3, 4]])).logits.isfinite().all()
