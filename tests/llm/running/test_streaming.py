"""Streamed models compute the logits of resident ones, with two blocks in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparsebit.errors import CheckpointError, ConfigError
from sparsebit.llm import Recipe, load, load_streamed, quantize, resident_bytes, stream_usage
from tests.llm.tiny_models import saved, tiny_model

TOKENS = torch.arange(3, 35).view(2, 16)


def packed(tmp_path: Path, kind: str = "llama", bits: int = 4, blocks: int = 4) -> Path:
    folder = saved(tiny_model(kind, num_hidden_layers=blocks), tmp_path / "model")
    recipe = Recipe(method="rtn", scale_search="none", group_size=32, bits=bits)
    return quantize(folder, tmp_path / "packed", recipe, check=False).folder


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "phi", "gemma3_text", "opt"])
def test_equal_logits_and_two_blocks_in_memory(kind: str, tmp_path: Path) -> None:
    folder = packed(tmp_path, kind)
    resident, streamed = load(folder), load_streamed(folder)
    for _ in range(2):
        with torch.no_grad():
            found, expected = streamed(TOKENS).logits, resident(TOKENS).logits
        assert torch.equal(found, expected)
    usage = stream_usage(streamed)
    blocks = next(part for part in resident.modules() if isinstance(part, torch.nn.ModuleList) and len(part) == 4)
    largest = max(resident_bytes(block) for block in blocks)
    assert largest <= usage.peak_bytes <= 2 * largest
    assert 8 <= usage.num_reads <= 9  # the first one for the next forward may be there already
    assert resident_bytes(streamed) <= resident_bytes(resident) - resident_bytes(blocks)  # nothing is left behind


def test_generation_of_float_and_packed_models(tmp_path: Path) -> None:
    for folder in (packed(tmp_path, bits=3, blocks=2), tmp_path / "model"):
        texts = [
            model.generate(TOKENS[:1], max_new_tokens=6, do_sample=False, pad_token_id=0)
            for model in (load_streamed(folder), load(folder))
        ]
        assert torch.equal(*texts)


def test_one_block(tmp_path: Path) -> None:
    folder = packed(tmp_path, blocks=1)
    with torch.no_grad():
        assert torch.equal(load_streamed(folder)(TOKENS).logits, load(folder)(TOKENS).logits)


def test_a_forward_that_was_broken_off(tmp_path: Path) -> None:
    folder = packed(tmp_path)
    model, expected = load_streamed(folder), load(folder)(TOKENS).logits

    class Stop(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stop

    with torch.no_grad():
        hook = model.model.layers[1].mlp.register_forward_hook(stop)
        with pytest.raises(Stop):
            model(TOKENS)
        hook.remove()
        assert torch.equal(model(TOKENS).logits, expected)
    assert stream_usage(model).peak_bytes <= 2 * max(resident_bytes(block) for block in load(folder).model.layers)


def test_a_file_that_vanished_is_an_error_of_the_forward(tmp_path: Path) -> None:
    folder = packed(tmp_path)
    model = load_streamed(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"), torch.no_grad():
        model(TOKENS)


def test_usage_of_a_resident_model() -> None:
    with pytest.raises(ConfigError, match="is not streamed"):
        stream_usage(tiny_model(num_hidden_layers=1))
