"""GPT-2's Conv1D layers: quantized as linear layers, written, and loaded with the logits of the unpacked weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from sparsebit.errors import ConfigError
from sparsebit.llm import Calibration, Recipe, load, merge, perplexity, quantize
from sparsebit.llm.layers.quant_linear import QuantLinear
from sparsebit.llm.models.model_folder import ModelFolder
from sparsebit.llm.models.skeleton import Skeleton
from tests.llm.tiny_models import SIZES, loaded, saved, tiny_model, with_tokenizer, write_text

TOKENS = torch.randint(0, 90, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    # n_inner is the width: a square weight, which shows a forgotten transposition only in its values
    model = tiny_model("gpt2", num_hidden_layers=2, n_inner=SIZES["hidden_size"])
    return with_tokenizer(saved(model, tmp_path / "gpt2", dtype=torch.float32))


def test_a_float_folder_loads_as_transformers_does(folder: Path) -> None:
    skeleton = Skeleton(ModelFolder(folder))
    assert all(type(skeleton.model.get_submodule(name[: -len(".weight")])) is nn.Linear for name in skeleton.transposed)
    assert len(skeleton.transposed) == 8
    with torch.no_grad():
        difference = (load(folder)(TOKENS).logits - loaded(folder)(TOKENS).logits).abs().max()
    assert difference < 1e-4


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_quantized(folder: Path, tmp_path: Path, method: str) -> None:
    text = Calibration(write_text(tmp_path / "text.txt"), num_samples=8, length=24)
    made = quantize(folder, tmp_path / "packed", Recipe(bits=8, group_size=32, method=method), text)
    assert made.check is not None and made.check.difference < 1e-3 and "Conv1D" in made.check.reader
    model = load(made.folder)
    assert sum(isinstance(module, QuantLinear) for module in model.modules()) == 8
    with torch.no_grad():
        wanted = loaded(folder)(TOKENS).logits
        error = (model(TOKENS).logits - wanted).square().mean() / wanted.square().mean()
    assert error < 1e-3  # 8 bits: a transposed square weight would be an error near 1
    windows = TOKENS[:, :8]
    assert abs(perplexity(model, windows).value / perplexity(load(folder), windows).value - 1) < 0.05


def test_merging_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Conv1D layers"):
        merge(tmp_path / "adapter", tmp_path / "merged", model=folder)
