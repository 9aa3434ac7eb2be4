"""Folders with a packed cache: written by `quantize`, read alike by transformers, converted, damaged, foreign."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebit.errors import CheckpointError, ConfigError
from sparsebit.llm import Calibration, Recipe, convert, load, load_streamed, quantize, recipe_for
from sparsebit.llm.caching.packed_cache import packed_cache_kind
from sparsebit.llm.converting.load_check import difference_of_transformers
from sparsebit.llm.models.model_folder import ModelFolder
from sparsebit.tensor_files import load_tensors, save_tensors
from tests.llm.tiny_models import saved, tiny_model, with_tokenizer, write_text
from tests.parameters import first_fast

pytest.importorskip("compressed_tensors")
TOKENS = torch.randint(3, 90, (2, 24), generator=torch.Generator().manual_seed(0))
FAST: dict[str, Any] = {"method": "rtn", "scale_search": "none", "group_size": 32, "symmetric": True}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_text(tmp_path / "text.txt")
    return with_tokenizer(saved(tiny_model(), tmp_path / "model"))


def made(source: Path, kind: str, scales: str | None = None) -> Path:
    recipe = Recipe(**FAST, kv_cache=kind, **({} if scales is None else {"kv_scales": scales}))
    text = Calibration(source.parent / "text.txt", num_samples=6, length=24)
    result = quantize(source, source.parent / f"{kind}-{scales}", recipe, text)
    assert result.check is not None and result.check.difference <= 1e-3
    return result.folder


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(TOKENS).logits
    return found


@pytest.mark.parametrize(("kind", "scales"), [("int8", None), ("fp8", "layer"), ("fp8", None)])
def test_transformers_computes_the_same(source: Path, kind: str, scales: str | None) -> None:
    folder = made(source, kind, scales)
    scheme = json.loads((folder / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]
    assert scheme["strategy"] == ("tensor" if scales else "attn_head") and scheme["num_bits"] == 8
    assert ModelFolder(folder).tensor("model.layers.1.self_attn.v_scale").shape == ((1,) if scales else (2, 1, 1))
    ours = load(folder)
    assert packed_cache_kind(ours) == kind
    assert difference_of_transformers(folder, TOKENS) <= 1e-3
    plain = logits(load(folder, kv_cache="float"))
    assert (
        float((logits(ours) - plain).abs().max() / plain.abs().max()) > 1e-3
    )  # so that the check has something to see
    assert torch.equal(logits(load_streamed(folder)), logits(ours))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen2", "mistral", "phi3", "gemma3_text", "qwen3"])
def test_architectures(model_type: str, tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt")
    for kind in ("int8", "fp8", "int4"):
        folder = tmp_path / "model"
        if not folder.exists():
            with_tokenizer(saved(tiny_model(model_type), folder))
        made(folder, kind)


def test_four_bits_are_ours_alone(source: Path) -> None:
    folder = made(source, "int4")
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["kv_cache_scheme"] is None and config["sparsebit_kv_cache"]["num_bits"] == 4
    assert packed_cache_kind(load(folder)) == "int4"
    config["sparsebit_kv_cache"]["block_size"] = 64
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"sparsebit_kv_cache in config\.json is"):
        load(folder)


def test_the_caller_chooses(source: Path) -> None:
    folder = made(source, "int8")
    kinds = {wanted: packed_cache_kind(load(folder, kv_cache=wanted)) for wanted in ("folder", "float", "fp8", "int4")}
    assert kinds == {"folder": "int8", "float": None, "fp8": "fp8", "int4": "int4"}
    exact = logits(load(folder, kv_cache="float"))
    assert float((logits(load(folder, kv_cache="fp8")) - exact).abs().max() / exact.abs().max()) < 0.3
    assert packed_cache_kind(load(source, kv_cache="int4")) == "int4"  # a float model
    with pytest.raises(ConfigError, match="has no calibrated scales for a cache of kind fp8"):
        load(source, kv_cache="fp8")
    with pytest.raises(ConfigError, match="kv_cache='int2': allowed: folder, float, int8, fp8, int4"):
        load(source, kv_cache="int2")


@pytest.mark.parametrize("kind", first_fast(["int8", "int4"], 1))
def test_conversion(source: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = made(source, kind)
    same = convert(folder, source.parent / "same", "compressed-tensors").output
    assert torch.equal(logits(load(same)), logits(load(folder)))
    with caplog.at_level(logging.WARNING):
        other = convert(folder, source.parent / "gptq", "gptq").output
    expected = load(folder, kv_cache="float" if kind == "int8" else "folder")
    assert torch.equal(logits(load(other)), logits(expected))
    assert ("have no scales for a cache" in caplog.text) == (kind == "int8")
    assert not any(name.endswith("_scale") for name in ModelFolder(other))


def test_damaged_scales(source: Path) -> None:
    folder = made(source, "int8")
    path = folder / "kv_cache.safetensors"
    tensors, facts = load_tensors(path)
    (folder / "checksums.json").unlink()
    name = "model.layers.0.self_attn.k_scale"
    for value, words in (
        (torch.zeros(2, 1, 1), "allowed: 1 or 2 or 4 finite scales above 0"),
        (torch.ones(3), r"of the shape \(3,\)"),
        (torch.full((1,), torch.nan), "finite scales above 0"),
    ):
        save_tensors({**tensors, name: value}, path, facts)
        with pytest.raises(CheckpointError, match=words):
            load(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["weight_map"][name]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="has no k_scale of layer 0"):
        load(folder)


def test_schemes_of_others(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    """llm-compressor's entry without scales, and a dynamic one: the cache stays float, with a warning."""
    folder = made(source, "float")
    config = json.loads((folder / "config.json").read_text())
    (folder / "checksums.json").unlink()
    for more, words in (
        ({"dynamic": True}, "only constant scales of 8 bits are read"),
        ({}, "the files have no scales for it"),
    ):
        scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False, **more}
        config["quantization_config"]["kv_cache_scheme"] = scheme
        (folder / "config.json").write_text(json.dumps(config))
        with caplog.at_level(logging.WARNING):
            assert packed_cache_kind(load(folder)) is None
        assert words in caplog.text


def test_recipes() -> None:
    with pytest.raises(ConfigError, match="kv_scales with kv_cache='int4': it is for int8 and fp8"):
        Recipe(kv_cache="int4", kv_scales="layer")
    assert recipe_for("vllm", kv_cache="fp8").kv_scales == "layer"
    with pytest.raises(
        ConfigError, match="kv_cache='int8' for vllm: it reads the scales of a cache of kind: float or fp8"
    ):
        recipe_for("vllm", kv_cache="int8")
    with pytest.raises(ConfigError, match=r"for llama\.cpp"):
        recipe_for("llama.cpp", kv_cache="int4")


def test_refusals_before_the_work(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache='fp8' needs calibration text"):
        quantize(source, tmp_path / "new", Recipe(**FAST, kv_cache="fp8"))
    with pytest.raises(ConfigError, match="0 modules in block 0 that servers recognize"):
        quantize(saved(tiny_model("gpt2"), tmp_path / "gpt2"), tmp_path / "new", Recipe(**FAST, kv_cache="int8"))
