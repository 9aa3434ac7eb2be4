"""Rotated models compute the same as before, or are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sparsebit.errors import ConfigError
from sparsebit.llm import Recipe, quantize
from sparsebit.llm.models.model_folder import ModelFolder
from sparsebit.llm.quantizing.rotating import rotate_model
from sparsebit.numerics.hadamard import rotate_blocks
from tests.llm.quantizing.test_quantize_folder import contents, logits
from tests.llm.tiny_models import loaded, saved, tiny_model

TWO: dict[str, Any] = {"num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [("llama", {}), ("llama", {"tie_word_embeddings": True}), ("qwen2", {}), ("phi3", {}), ("gemma", {})],
    ids=["llama", "tied", "biases", "fused", "one-plus-weight"],
)
def test_it_computes_the_same(model_type: str, changes: dict[str, Any], tmp_path: Path) -> None:
    source = saved(tiny_model(model_type, **TWO, **changes), tmp_path / "model", dtype=torch.float32)
    made = rotate_model(ModelFolder(source), tmp_path / "rotated", 32)
    before, after = loaded(source), loaded(made.path)
    wanted = logits(before)
    assert (logits(after) - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    first, second = (model.get_input_embeddings().weight for model in (before, after))
    torch.testing.assert_close(second, rotate_blocks(first, 32))
    assert not torch.equal(after.get_output_embeddings().weight, second)


@pytest.mark.parametrize("model_type", ["gemma3_text", "phi", "gpt_neox"])
def test_models_that_do_not_are_refused(model_type: str, tmp_path: Path) -> None:
    source = saved(tiny_model(model_type, num_hidden_layers=1), tmp_path / "model")
    with pytest.raises(ConfigError, match="does not compute the same with rotated hidden states"):
        rotate_model(ModelFolder(source), tmp_path / "rotated", 32)


def test_sizes_and_experts_are_refused(tmp_path: Path) -> None:
    source = saved(tiny_model("mixtral", num_hidden_layers=1), tmp_path / "model")
    with pytest.raises(ConfigError, match="power of two"):
        rotate_model(ModelFolder(source), tmp_path / "rotated", 48)
    with pytest.raises(ConfigError, match="model of experts"):
        rotate_model(ModelFolder(source), tmp_path / "rotated", 32)
    with pytest.raises(ConfigError, match="rotate=True: allowed: with groups"):
        Recipe("fp8", rotate=True)


def test_from_folder_to_folder(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    source = saved(tiny_model("llama", **TWO), tmp_path / "model")
    recipe = Recipe("rtn", 4, 32, scale_search="none", rotate=True)
    made = quantize(source, tmp_path / "packed", recipe)
    assert made.check is not None and made.check.difference <= 1e-3
    assert not (tmp_path / "packed.rotated").exists()
    again = quantize(source, tmp_path / "again", recipe, check=False)
    assert contents(again.folder) == contents(made.folder)
    (tmp_path / "other.rotated").mkdir()
    with pytest.raises(ConfigError, match="is not of an interrupted run"):
        quantize(source, tmp_path / "other", recipe)
