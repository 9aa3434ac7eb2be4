"""Tokenizers, prompts, devices and architectures that do not fit: each is told in words, where the fault is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparsebit.errors import CheckpointError, ConfigError, DeploymentError
from sparsebit.llm import Calibration, Recipe, convert, load, load_streamed, perplexity, quantize, token_stream
from sparsebit.llm.models.hub_classes import load_config, load_tokenizer
from sparsebit.llm.models.model_folder import ModelFolder
from sparsebit.llm.process_group import as_device
from tests.llm.tiny_models import saved, tiny_model, with_bpe, with_tokenizer, write_text

pytest.importorskip("compressed_tensors")
FAST = Recipe(method="rtn", scale_search="none", group_size=32, symmetric=True)


def tiny(folder: Path, model_type: str = "llama", **changes: Any) -> Path:
    return saved(tiny_model(model_type, num_hidden_layers=1, **changes), folder)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"has no tokenizer \(tokenizer.json"):
        load_tokenizer(folder)
    assert quantize(folder, tmp_path / "packed", FAST).check is not None  # nothing of it is needed


@pytest.mark.parametrize("content", ["{", '{"model": {}}', '{"model": {"type": "BPE", "vocab": 3}}'])
def test_a_damaged_tokenizer(tmp_path: Path, content: str) -> None:
    folder = tiny(tmp_path / "model")
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match="its tokenizer cannot be read"):
        load_tokenizer(folder)


def test_a_name_that_is_no_folder_is_not_looked_for_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("text")
    for name in (Path("meta-llama/Llama-3-8B"), tmp_path / "file.txt"):
        with pytest.raises(CheckpointError, match="is not a folder"):
            load_tokenizer(name)
        with pytest.raises(CheckpointError, match="is not a folder"):
            load_config(name)


def test_tokens_without_an_embedding(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    folder = with_tokenizer(tiny(tmp_path / "model", vocab_size=80))
    recipe = Recipe(bits=4, group_size=32)
    with pytest.raises(ConfigError, match=r"token 9.*embeddings for 80"):
        quantize(folder, tmp_path / "packed", recipe, Calibration(text, num_samples=4, length=24))
    tokens = token_stream(text, load_tokenizer(folder))
    with pytest.raises(ConfigError, match="embeddings for 80"):
        perplexity(load(folder), tokens[None, :24])
    assert perplexity(load(folder), tokens[None, :24].clamp(max=79)).num_predictions == 23


def test_a_tokenizer_that_fails_on_a_text(tmp_path: Path) -> None:
    def tokenizer(*_: Any, **__: Any) -> Any:
        raise RuntimeError("WordPiece error: Missing [UNK] token")

    with pytest.raises(ConfigError, match=r"does not take the text .*WordPiece"):
        token_stream(write_text(tmp_path / "text.txt"), tokenizer)


def test_tokens_that_a_gguf_file_has_no_row_for(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    folder = with_bpe(tiny(tmp_path / "model", vocab_size=258, bos_token_id=1, eos_token_id=2))
    made = quantize(folder, tmp_path / "packed", FAST, check=False)
    with pytest.raises(DeploymentError, match="token 258, and the model has embeddings for 258"):
        convert(made.folder, tmp_path / "file.gguf", "gguf")
    assert not (tmp_path / "file.gguf").exists()


def test_architectures_that_cannot_be_quantized(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(d_model=32, num_layers=1, num_heads=2, d_ff=64, d_kv=16, vocab_size=96)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    with pytest.raises(CheckpointError, match="'t5' is not a causal language model"):
        quantize(tmp_path / "t5", tmp_path / "packed", FAST)


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    model = tiny_model(num_hidden_layers=1)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 5] = torch.nan
    folder = saved(model, tmp_path / "model")
    for recipe in (FAST, Recipe(method="fp8")):
        with pytest.raises(CheckpointError, match=r"up_proj\.weight has NaN"):
            quantize(folder, tmp_path / recipe.method, recipe, check=False)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"])
def test_quantized_weights_without_a_config_are_refused(tmp_path: Path, dtype: torch.dtype, name: str) -> None:
    folder = tiny(tmp_path / "model")
    file = ModelFolder(folder).files[name]
    tensors = load_file(file)
    save_file({**tensors, name: tensors[name].to(dtype)}, file)
    for run in (load, lambda model: quantize(model, tmp_path / "packed", FAST)):
        with pytest.raises(CheckpointError, match=f"{name} is kept as {dtype}"):
            run(folder)


def test_norms_that_are_not_finite_are_named(tmp_path: Path) -> None:
    model = tiny_model(num_hidden_layers=1)
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight[3] = torch.nan
    with pytest.raises(CheckpointError, match=r"input_layernorm\.weight has NaN"):
        quantize(saved(model, tmp_path / "model"), tmp_path / "packed", FAST)


@pytest.mark.parametrize("method", ["rtn", "gptq", "autoround"])
def test_small_float16_weights_do_not_become_zero(tmp_path: Path, method: Any) -> None:
    recipe = Recipe(method=method, group_size=32, steps=2) if method == "autoround" else Recipe(method, group_size=32)
    model = tiny_model(num_hidden_layers=1)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight *= 1e-4
    folder = with_tokenizer(saved(model, tmp_path / "model"))
    text = Calibration(write_text(tmp_path / "text.txt"), num_samples=8, length=24)
    layer = load(quantize(folder, tmp_path / "packed", recipe, text).folder).model.layers[0].self_attn.q_proj
    weight = load(folder).model.layers[0].self_attn.q_proj.weight
    assert float((layer.packed.dequantize(torch.float32) - weight).norm() / weight.norm()) < 0.2


def test_pickles_are_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle.*save_pretrained"):
        ModelFolder(tmp_path)


@pytest.mark.parametrize("entries", [[], {}, None, "a"], ids=repr)
def test_an_index_without_tensors(tmp_path: Path, entries: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": entries}))
    with pytest.raises(CheckpointError, match="no weight_map"):
        ModelFolder(tmp_path)


def test_devices_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    folder = tiny(tmp_path / "model")
    for device, message in {"nonsense": "allowed: cpu, cuda", "cuda": "sees 0 GPUs", "cuda:3": "sees 0 GPUs"}.items():
        for call in (load, load_streamed):
            with pytest.raises(ConfigError, match=message):
                call(folder, device=device)
        with pytest.raises(ConfigError, match=message):
            quantize(folder, tmp_path / "packed", FAST, device=device)
    assert as_device(torch.device("cpu")).type == "cpu"
