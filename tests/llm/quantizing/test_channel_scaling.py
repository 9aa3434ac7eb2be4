"""`awq` from folder to folder: norms and biases are written changed, the packed model is the one that was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sparsebit.errors import ConfigError
from sparsebit.llm import Calibration, Recipe, ScaledInput, load, quantize
from sparsebit.llm.models.model_folder import ModelFolder
from tests.llm.quantizing.test_quantize_folder import contents, logits
from tests.llm.tiny_models import loaded, saved, stopped_after, tiny_model, with_tokenizer, write_text

pytest.importorskip("compressed_tensors")
SMALL = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
AWQ = Recipe(method="awq", bits=3, group_size=32)


def outlying(model: Any) -> Any:
    """A model whose norms give a few channels far larger values, as large models have them."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layernorm" in name and name.endswith("weight"):
                parameter[:3] += 12
    return model


def source_of(model: Any, folder: Path) -> Path:
    write_text(folder / "text.txt")
    return with_tokenizer(saved(model, folder / "model"))


def calibration(source: Path, num_samples: int = 6) -> Calibration:
    return Calibration(source.parent / "text.txt", num_samples=num_samples, length=24)


@pytest.mark.parametrize("model_type", ["qwen2", "gemma3_text"])
def test_end_to_end(model_type: str, tmp_path: Path) -> None:
    source = source_of(outlying(tiny_model(model_type, num_hidden_layers=1)), tmp_path)
    made = quantize(source, tmp_path / "packed", AWQ, calibration(source))
    assert made.check is not None and made.check.difference <= 1e-3
    assert all(scaled.reason is None for scaled in made.scaled_inputs.values())
    assert made.scaled_inputs["model.layers.0: self_attn.q_proj, self_attn.k_proj, self_attn.v_proj"].alpha > 0
    name = "model.layers.0.input_layernorm.weight"
    before, after = (ModelFolder(folder).tensor(name) for folder in (source, made.folder))
    assert after.dtype == before.dtype and not torch.equal(after, before)
    plain = quantize(source, tmp_path / "plain", Recipe("rtn", 3, 32), calibration(source), check=False)
    wanted = logits(loaded(source))
    errors = [float((logits(load(folder)) - wanted).square().mean()) for folder in (made.folder, plain.folder)]
    assert errors[0] < errors[1]


def test_what_is_not_scaled_is_told(tmp_path: Path) -> None:
    source = source_of(tiny_model("phi", num_hidden_layers=1), tmp_path)
    made = quantize(source, tmp_path / "packed", AWQ, calibration(source))
    expected = ScaledInput(reason="no preceding norm or layer can take the scale exactly")
    assert made.scaled_inputs["model.layers.0: mlp.fc2"] == expected
    assert made.scaled_inputs["model.layers.0: self_attn.dense"].source == "self_attn.v_proj"


def test_experts_are_told(tmp_path: Path) -> None:
    model = tiny_model("mixtral", num_hidden_layers=1, num_local_experts=2, **SMALL)
    source = source_of(model, tmp_path)
    made = quantize(source, tmp_path / "packed", Recipe("awq", group_size=32, symmetric=True), calibration(source))
    assert made.check is not None and made.check.difference <= 1e-3
    told = made.scaled_inputs["model.layers.0: mlp.experts.0.w1, mlp.experts.0.w3"].reason
    assert told is not None and "chooses the experts" in told
    assert len(made.experts) == 6


def test_the_same_bytes_after_an_interruption(tmp_path: Path) -> None:
    source = source_of(outlying(tiny_model("llama", num_hidden_layers=2, **SMALL)), tmp_path)
    whole = quantize(source, tmp_path / "whole", AWQ, calibration(source), check=False)
    with stopped_after():
        quantize(source, tmp_path / "packed", AWQ, calibration(source), check=False)
    again = quantize(source, tmp_path / "packed", AWQ, calibration(source), check=False)
    assert again.num_resumed == 1 and again.scaled_inputs == whole.scaled_inputs
    assert contents(again.folder) == contents(whole.folder)


def test_options_of_gptq_are_refused() -> None:
    with pytest.raises(ConfigError, match="damping with method='awq'"):
        Recipe("awq", damping=0.1)
    with pytest.raises(ConfigError, match="awq does not run GPTQ"):
        Recipe("awq", scale_search="gptq")
