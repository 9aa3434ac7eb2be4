"""`merge`: the model with its adapter as one model, and what it loses."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparsebit.errors import ConfigError, DeploymentError, SparsebitError
from sparsebit.llm import Calibration, PackedWeight, QuantLinear, Recipe, finetune, load, load_adapter, merge, quantize
from sparsebit.llm.finetuning.merging import add_to_packed
from tests.llm.finetuning.tasks import TUNING, instructions, packed_model
from tests.llm.tiny_models import loaded, saved, tiny_model, with_tokenizer

peft = pytest.importorskip("peft")
TOKENS = torch.arange(3, 51).view(2, 24)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp_path = tmp_path_factory.mktemp("adapter")
    model = packed_model(tmp_path)
    tuning = replace(TUNING, num_epochs=6, targets=("q_proj", "down_proj"))
    return finetune(model, instructions(tmp_path), tmp_path / "adapter", tuning).folder


def test_merged_models(adapter: Path, tmp_path: Path) -> None:
    base = adapter.parent / "packed-llama-4"
    packed = merge(adapter, tmp_path / "merged", windows=TOKENS, max_loss=1)
    half = merge(adapter, tmp_path / "half", kind="bfloat16", model=base)
    assert (packed.num_layers, half.num_layers) == (2, 2)
    assert half.logit_error < 0.01 < packed.logit_error < 0.3 and half.perplexity_merged is None
    assert packed.perplexity_with_adapter is not None and packed.perplexity_merged is not None
    assert packed.perplexity_merged == pytest.approx(packed.perplexity_with_adapter, rel=0.3)
    merged, before = load(packed.folder), load(base)
    with torch.no_grad():
        wanted = load_adapter(load(base), adapter)(TOKENS).logits
        found, without, plain = merged(TOKENS).logits, before(TOKENS).logits, loaded(half.folder)(TOKENS).logits
    assert half.update_lost is not None and half.update_lost < 0.001
    assert packed.update_lost is not None and packed.update_lost < 0.5
    assert (plain - wanted).norm() < 0.01 * wanted.norm()
    assert (found - wanted).norm() < 0.5 * (without - wanted).norm()
    layers = {name: part for name, part in merged.named_modules() if isinstance(part, QuantLinear)}
    assert len(layers) == 7
    for name, part in before.named_modules():
        if isinstance(part, QuantLinear) and not name.endswith(("q_proj", "down_proj")):
            assert torch.equal(part.qweight, layers[name].qweight)


@pytest.fixture(scope="module")
def weak_adapter(adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its updates are smaller than half of a step, so that rounding to nearest drops them."""
    folder = shutil.copytree(adapter, tmp_path_factory.mktemp("weak") / "adapter")
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors = {name: value * (0.05 if "lora_B" in name else 1) for name, value in tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "checksums.json").unlink()
    return folder


@pytest.mark.parametrize("windows", [TOKENS, None], ids=["text", "arbitrary"])
def test_a_lost_update_is_refused(weak_adapter: Path, tmp_path: Path, windows: torch.Tensor | None) -> None:
    with pytest.raises(DeploymentError, match=r"loses \d+% of what the adapter changes") as raised:
        merge(weak_adapter, tmp_path / "merged", windows=windows)
    message = str(raised.value)
    assert "--to float16" in message and "--to requantized --calibration" in message and "--max-loss" in message
    assert not list(tmp_path.iterdir())
    kept = merge(weak_adapter, tmp_path / "merged", windows=windows, max_loss=2)
    assert kept.update_lost is not None and kept.update_lost > 0.5


def test_requantized(weak_adapter: Path, adapter: Path, tmp_path: Path) -> None:
    base, text = adapter.parent / "packed-llama-4", tmp_path / "text.txt"
    text.write_text("say a: aaaa, say b: bbbb. " * 80)
    calibration = Calibration(text, num_samples=16, length=24)
    with pytest.raises(ConfigError, match="needs calibration text"):
        merge(adapter, tmp_path / "merged", kind="requantized")
    with pytest.raises(ConfigError, match="calibration with kind='packed'"):
        merge(adapter, tmp_path / "merged", calibration=calibration)
    made = merge(adapter, tmp_path / "merged", kind="requantized", windows=TOKENS, calibration=calibration, max_loss=9)
    assert made.update_lost is not None
    before, after = (load(folder) for folder in (base, made.folder))
    formats = [
        {name: (part.bits, part.group_size) for name, part in model.named_modules() if isinstance(part, QuantLinear)}
        for model in (before, after)
    ]
    assert formats[0] == formats[1] and len(formats[0]) == 7
    assert [path.name for path in tmp_path.iterdir() if path.name != "text.txt"] == ["merged"]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_an_update_of_a_packed_weight(bits: int, symmetric: bool) -> None:
    torch.manual_seed(0)
    codes, scales = torch.randint(0, 1 << bits, (8, 64)), torch.rand(8, 2) + 0.1
    zeros = None if symmetric else torch.randint(0, 1 << bits, (8, 2))
    packed = PackedWeight.from_codes(codes, scales, zeros, bits)
    same = add_to_packed(packed, torch.zeros(8, 64), "layer")
    torch.testing.assert_close(same.dequantize(torch.float32), packed.dequantize(torch.float32), rtol=1e-3, atol=1e-3)
    update = torch.randn(8, 64) * 0.3 * scales.mean()
    wanted = packed.dequantize(torch.float32) + update
    found = add_to_packed(packed, update, "layer")
    assert (found.bits, found.group_size, found.symmetric) == (bits, 32, symmetric)
    error = (found.dequantize(torch.float32) - wanted).norm()
    assert error < update.norm()  # nearer than without the update
    steps = (wanted - found.dequantize(torch.float32)).abs() / found.scales.repeat_interleave(32, 1)
    assert float(steps.median()) <= 0.5


def test_what_cannot_be_merged(adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="allowed: packed, requantized, bfloat16, float16"):
        merge(adapter, tmp_path / "out", kind="int4")
    with pytest.raises(ConfigError, match="is a float model"):
        merge(adapter, tmp_path / "out", model=adapter.parent / "float-llama")
    moved = shutil.copytree(adapter, tmp_path / "moved")
    config = json.loads((moved / "adapter_config.json").read_text())
    (moved / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "elsewhere"}))
    with pytest.raises(ConfigError, match="which is not a folder here"):
        merge(moved, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore")  # of peft, about unusual adapters
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_bias": True}, r"lora_B\.bias, which does not update a weight"),
        ({"bias": "all"}, r"bias, which does not update a weight"),
        ({"trainable_token_indices": [3, 4]}, "trainable_tokens_delta, which does not update a weight"),
        ({"target_modules": ["lm_head"]}, "lm_head, whose weight is that of another layer"),
        ({"layer_replication": [[0, 1], [0, 1]]}, r"model\.layers\.1\.self_attn\.q_proj, which the files"),
        ({"modules_to_save": ["lm_head"]}, "which replaces a whole layer"),
    ],
    ids=["bias-of-the-adapter", "bias", "tokens", "tied", "replicated", "whole-layer"],
)
def test_what_would_be_lost_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = packed_model(tmp_path, kind="qwen2", tie_word_embeddings=True)
    config = peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **changes})
    wrapped = peft.get_peft_model(loaded(tmp_path / "float-qwen2"), config)
    for parameter in wrapped.parameters():
        parameter.data += 0.01 * parameter.requires_grad
    wrapped.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConfigError, match=message):
        merge(tmp_path / "adapter", tmp_path / "out", model=model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init_lora_weights": "pissa"}, "changed the weight below it at model.layers.0.self_attn.q_proj"),
        ({"init_lora_weights": "olora"}, "changed the weight below it"),
        ({"alora_invocation_tokens": [10, 11]}, "does more than add an update"),
        ({"init_lora_weights": "orthogonal"}, None),
    ],
    ids=["pissa", "olora", "alora", "orthogonal"],
)
def test_updates_of_other_weights_than_those_of_a_float_model(
    changes: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    """They were added to the weights of the files, and a model with an error of 100 % was kept."""
    model = with_tokenizer(saved(tiny_model(num_hidden_layers=1), tmp_path / "model", dtype=torch.float32))
    config = peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **changes})
    wrapped = peft.get_peft_model(loaded(model), config)
    for parameter in wrapped.parameters():
        parameter.data += 0.1 * parameter.requires_grad
    wrapped.save_pretrained(tmp_path / "adapter")
    if message is None:
        assert merge(tmp_path / "adapter", tmp_path / "out", model=model, kind="bfloat16").logit_error < 0.05
        return
    with pytest.raises(ConfigError, match=message):
        merge(tmp_path / "adapter", tmp_path / "out", model=model, kind="bfloat16")


def change_config(**entries: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | entries))

    return change


def change_tensor(value: float) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        tensors[min(tensors)][0, 0] = value
        save_file(tensors, folder / "adapter_model.safetensors")

    return change


def cut(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut, "adapter_model.safetensors cannot be read"),
        (lambda folder: (folder / "adapter_config.json").write_text("[]"), "is not the folder of an adapter"),
        (change_config(lora_alpha=None), "does not fit the model"),
        (change_config(peft_type="UNKNOWN"), "adapter_config.json cannot be read"),
        (change_tensor(float("nan")), "has NaN or infinite values"),
        (change_tensor(1e9), "too large for torch.float16; merge to bfloat16"),
    ],
    ids=["cut off", "config is a list", "no alpha", "unknown type", "NaN", "too large"],
)
def test_a_damaged_adapter(adapter: Path, tmp_path: Path, change: Callable[[Path], Any], message: str) -> None:
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    (folder / "checksums.json").unlink()
    change(folder)
    with pytest.raises(SparsebitError, match=message):
        merge(folder, tmp_path / "merged", kind="float16")
    assert os.listdir(tmp_path) == ["adapter"]


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_of_the_output_layer_is_merged(tmp_path: Path) -> None:
    model = packed_model(tmp_path, tie_word_embeddings=False)
    config = peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False, task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(loaded(tmp_path / "float-llama"), config)
    wrapped.save_pretrained(tmp_path / "adapter")  # with a copy of the layer's weight
    assert merge(tmp_path / "adapter", tmp_path / "out", model=model, kind="float16").logit_error < 1e-2


def test_what_chooses_experts_stays_float_in_a_merged_model(tmp_path: Path) -> None:
    source = with_tokenizer(saved(tiny_model("mixtral", num_hidden_layers=1), tmp_path / "float"))
    recipe = Recipe(method="rtn", scale_search="none", group_size=32, symmetric=True)
    model = quantize(source, tmp_path / "packed", recipe, check=False).folder
    made = finetune(model, instructions(tmp_path), tmp_path / "adapter", replace(TUNING, max_steps=1)).folder
    ignored = [
        json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"]
        for folder in (model, merge(made, tmp_path / "merged", max_loss=9).folder)
    ]
    assert ignored[0] == ignored[1] and "model.layers.0.block_sparse_moe.gate" in ignored[0]
