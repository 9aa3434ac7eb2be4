"""`recipe_for`: runtimes store what was asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparsebit.errors import ConfigError, DeploymentError
from sparsebit.llm import Recipe, recipe_for
from sparsebit.llm.checkpoint.layer_format import LayerFormat
from sparsebit.llm.converting.genai_folder import why_not
from sparsebit.llm.converting.targets import TARGETS, need_model, vllm_reasons
from sparsebit.llm.gguf.blocks import block_type
from tests.llm.tiny_models import saved, tiny_model


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [None, True, False], ids=["any", "symmetric", "zero-points"])
@pytest.mark.parametrize("group_size", [None, 0, 32, 96, 128])
def test_the_rules_of_each_runtime_allow_the_recipe(
    target: str, bits: int, symmetric: bool | None, group_size: int | None
) -> None:
    given = {"bits": bits, "symmetric": symmetric, "group_size": group_size}
    given = {name: value for name, value in given.items() if value is not None}
    try:
        recipe = recipe_for(target, **given)
    except ConfigError:
        with pytest.raises(ConfigError, match=f"for {target}: it stores"):
            recipe_for(target, **given)
        return
    layer = LayerFormat(recipe.bits, recipe.group_size, recipe.symmetric)
    assert recipe.bits == bits and {name: getattr(recipe, name) for name in given} == given
    if target == "llama.cpp":
        assert block_type(bits, recipe.symmetric) == f"Q{bits}_0" and recipe.group_size == 32
    if target == "vllm":
        assert vllm_reasons({"a": layer}, []) == ()
    if target == "genai":
        assert why_not({"a": layer}, {"a": 4096}) is None


@pytest.mark.parametrize(
    ("target", "given", "message"),
    [
        ("llama.cpp", {"bits": 3}, "3 bits for llama.cpp: .* would store them in 4; ask for 4 or 8"),
        ("llama.cpp", {"group_size": 128}, "group_size=128 for llama.cpp"),
        ("llama.cpp", {"symmetric": False}, "symmetric=False for llama.cpp"),
        ("llama.cpp", {"method": "nvfp4"}, "method='nvfp4' for llama.cpp"),
        ("llama.cpp", {"candidate_bits": (2, 4), "average_bits": 3.0}, "2 bits for llama.cpp"),
        ("vllm", {"bits": 2}, "2 bits for vllm"),
        ("vllm", {"bits": 8, "symmetric": False}, "symmetric=False for vllm"),
        ("genai", {"bits": 3}, "3 bits for genai"),
        ("genai", {"group_size": 0}, "group_size=0 for genai"),
        ("ollama", {}, "allowed: llama.cpp, vllm, transformers, genai"),
        ("transformers", {"bits": 5}, "bits=5: allowed: 2, 3, 4, 8"),
    ],
)
def test_conflicts(target: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe_for(target, **given)


def test_a_model_that_gguf_does_not_have(tmp_path: Path) -> None:
    folder = saved(tiny_model("opt"), tmp_path / "model")
    need_model("vllm", folder)
    with pytest.raises(DeploymentError, match="GGUF files of model type 'opt'"):
        need_model("llama.cpp", folder)


def test_a_tokenizer_that_gguf_does_not_have(tmp_path: Path) -> None:
    folder = saved(tiny_model(), tmp_path / "model")
    tokenizer = {"model": {"type": "Unigram", "vocab": []}, "added_tokens": [], "pre_tokenizer": None}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(DeploymentError, match="is of type 'Unigram'"):
        need_model("llama.cpp", folder)


def test_rotary_embeddings_that_gguf_does_not_have(tmp_path: Path) -> None:
    rotary = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    folder = saved(tiny_model(rope_parameters=rotary), tmp_path / "model")
    with pytest.raises(DeploymentError, match="dynamic"):
        need_model("llama.cpp", folder)


def test_a_model_that_the_builder_does_not_know(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime_genai")
    need_model("genai", saved(tiny_model(), tmp_path / "llama"))
    with pytest.raises(DeploymentError, match=r"does not know OPTForCausalLM; it knows .*LlamaForCausalLM"):
        need_model("genai", saved(tiny_model("opt"), tmp_path / "opt"))


def test_other_fields_stay() -> None:
    assert recipe_for("llama.cpp") == Recipe(symmetric=True, group_size=32)
    assert recipe_for("vllm", bits=8) == Recipe(bits=8, symmetric=True)
    assert recipe_for("transformers", bits=3, method="awq") == Recipe(bits=3, method="awq")
    assert recipe_for("vllm", method="fp8") == Recipe(method="fp8")
    mixed = recipe_for("vllm", candidate_bits=(4, 8), average_bits=5.0)
    assert mixed.symmetric and mixed.candidate_bits == (4, 8)
