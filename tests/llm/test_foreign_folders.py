"""Folders of other tools: what they say in unusual ways is read as transformers reads it, or refused."""

from __future__ import annotations

import copy
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparsebit.errors import CheckpointError, ConfigError, MissingExtraError
from sparsebit.llm import Recipe, load, load_streamed, quantize
from sparsebit.llm.converting.load_check import relative_difference
from sparsebit.llm.models.hub_classes import load_config, load_tokenizer
from sparsebit.llm.models.model_folder import ModelFolder
from tests.llm.tiny_models import loaded, saved, tiny_model

pytest.importorskip("compressed_tensors")
FAST = Recipe(method="rtn", scale_search="none", group_size=32)
ROUNDED = 3e-3  # transformers 5.23 rounds unpacked weights to float16
TOKENS = torch.randint(3, 96, (1, 20), generator=torch.Generator().manual_seed(1))


def tiny(folder: Path, model_type: str = "llama", **changes: Any) -> Path:
    return saved(tiny_model(model_type, num_hidden_layers=1, **changes), folder)


def packed(folder: Path, model_type: str = "llama", **changes: Any) -> Path:
    """A packed model without checksums, as other tools write it."""
    made = quantize(tiny(folder / "float", model_type, **changes), folder / "packed", FAST, check=False).folder
    (made / "checksums.json").unlink()
    return made


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change what the files hold; all tensors come into one file."""
    tensors = {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}
    for path in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        path.unlink(missing_ok=True)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def first_group(config: dict[str, Any]) -> dict[str, Any]:
    group: dict[str, Any] = config["quantization_config"]["config_groups"]["group_0"]
    return group


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model(TOKENS, use_cache=False).logits
    return found


@pytest.mark.parametrize("order", ["shuffled", "unused"])
def test_groups_by_activation(tmp_path: Path, order: str) -> None:
    folder = packed(tmp_path)
    expected = logits(load(folder))

    def add(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("weight_shape")]:
            groups = torch.arange(int(tensors[name][1])).flip(0) // 32
            tensors[name.replace("shape", "g_idx")] = (groups if order == "shuffled" else groups * 0 - 1).int()

    edit_tensors(folder, add)
    if order == "unused":
        assert torch.equal(logits(load(folder)), expected)
        return
    with pytest.raises(CheckpointError, match="groups by activation"):
        load(folder)


@pytest.mark.parametrize("key", ["transform_config", "sparsity_config"])
def test_what_would_have_to_be_computed_too_is_refused(tmp_path: Path, key: str) -> None:
    folder = packed(tmp_path)
    edit(folder, lambda config: config["quantization_config"].update({key: {}}))
    load(folder)
    edit(folder, lambda config: config["quantization_config"].update({key: {"config_groups": {"R1": {}}}}))
    with pytest.raises(CheckpointError, match=key):
        load(folder)


def test_rounded_outputs_and_caches(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = packed(tmp_path)
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    edit(folder, lambda config: config["quantization_config"].update(kv_cache_scheme=scheme))
    with caplog.at_level(logging.WARNING):
        load(folder)
    assert "cache of keys and values stays float" in caplog.text
    edit(folder, lambda config: first_group(config).update(output_activations=scheme))
    with pytest.raises(CheckpointError, match="float activations"):
        load(folder)


def test_the_name_of_a_layer_goes_before_its_class(tmp_path: Path) -> None:
    folder = packed(tmp_path)
    expected = logits(load(folder))

    def add(config: dict[str, Any]) -> None:
        second = copy.deepcopy(first_group(config))
        second["targets"] = ["re:.*proj"]
        first_group(config)["weights"]["symmetric"] = True
        config["quantization_config"]["config_groups"]["group_1"] = second

    edit(folder, add)
    assert torch.equal(logits(load(folder)), expected)


def test_zero_points_of_a_layer_that_is_said_to_be_symmetric(tmp_path: Path) -> None:
    folder = packed(tmp_path)
    edit(folder, lambda config: first_group(config)["weights"].update(symmetric=True))
    with pytest.raises(CheckpointError, match="has zero points, and its config says"):
        load(folder)

    def middle(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("zero_point")]:
            tensors[name] = torch.full_like(tensors[name], int.from_bytes(b"\x88" * 4, signed=True))  # eight times 8

    edit_tensors(folder, middle)
    load(folder)


class TestOutputLayer:
    """Embeddings and output layer that differ, in a model whose config says that they are one."""

    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        folder = tiny(tmp_path / "model", tie_word_embeddings=False)
        edit(folder, lambda config: config.update(tie_word_embeddings=True))
        return folder

    def test_is_loaded_as_transformers_does(self, source: Path, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            found = load(source)
        assert torch.equal(logits(found), logits(loaded(source)))
        assert torch.equal(logits(load_streamed(source)), logits(loaded(source)))
        assert "not tied" in caplog.text
        found.tie_weights()  # as peft does
        assert torch.equal(logits(found), logits(loaded(source)))

    def test_is_quantized_so(self, source: Path, tmp_path: Path) -> None:
        made = quantize(source, tmp_path / "packed", FAST)
        assert ModelFolder(made.folder).config["tie_word_embeddings"] is False
        assert relative_difference(logits(loaded(made.folder)), logits(load(made.folder))) < ROUNDED

    def test_alone_is_the_embedding_too(self, tmp_path: Path) -> None:
        folder = tiny(tmp_path / "model", tie_word_embeddings=True)
        expected = logits(load(folder))
        edit_tensors(folder, lambda given: given.update({"lm_head.weight": given.pop("model.embed_tokens.weight")}))
        assert torch.equal(logits(load(folder)), expected)


def test_two_models_in_a_folder(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "model")
    tiny_model(num_hidden_layers=1).save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "model.safetensors", folder)
    with pytest.raises(CheckpointError, match="two models"):
        load(folder)


@pytest.mark.parametrize("read", [load, load_streamed])
def test_a_bias_that_is_missing(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    folder = packed(tmp_path, "qwen2")
    edit_tensors(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith("q_proj.bias")])
    with pytest.raises(CheckpointError, match=r"no tensor for model\.layers\.0\.self_attn\.q_proj\.bias"):
        logits(read(folder))


def test_tensors_without_a_place_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = packed(tmp_path, attention_bias=True)
    with caplog.at_level(logging.WARNING):
        load(folder)
    assert not caplog.text
    edit(folder, lambda config: config.update(attention_bias=False))
    with caplog.at_level(logging.WARNING):
        found = load(folder)
    assert "4 tensors have no place in LlamaForCausalLM" in caplog.text
    assert relative_difference(logits(loaded(folder)), logits(found)) < ROUNDED


def test_a_packed_layer_of_another_shape(tmp_path: Path) -> None:
    folder = packed(tmp_path)
    edit(folder, lambda config: config.update(num_key_value_heads=4))
    with pytest.raises(CheckpointError, match="the architecture wants"):
        load(folder)


def test_a_packed_model_is_not_saved_in_files_that_nothing_reads(tmp_path: Path) -> None:
    model = load(packed(tmp_path))
    with pytest.raises(ConfigError, match="nothing reads"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    load(tmp_path / "float").save_pretrained(tmp_path / "saved")


@pytest.mark.parametrize(
    "change",
    [
        {"config_groups": {"W4A16": ["Linear"]}},
        {"config_groups": None},
        {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"strategy": "group", "num_bits": 4}}}},
    ],
    ids=["short", "none", "without-groups"],
)
def test_a_quantization_config_that_is_not_understood(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = packed(tmp_path)
    edit(folder, lambda config: config["quantization_config"].update(change))
    with pytest.raises(CheckpointError, match=r"quantization_config in its config\.json is not understood"):
        load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": "three"}, "its config cannot be read"),
        ({"hidden_act": "nonsense"}, "cannot be built from its config .*nonsense"),
        ({"_attn_implementation": "flash_attention_2"}, "cannot be built from its config .*FlashAttention"),
    ],
    ids=["type", "activation", "package"],
)
def test_a_config_that_no_model_can_be_built_from(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = tiny(tmp_path / "model")
    edit(folder, lambda config: config.update(change))
    with pytest.raises(CheckpointError, match=message):
        load(folder)


@pytest.mark.parametrize("auto", ["AutoConfig", "AutoTokenizer"])
def test_a_broken_package_is_told_from_a_damaged_folder(
    auto: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers tells of a torchvision that does not fit the installed torch."""
    transformers = pytest.importorskip("transformers")
    folder = saved(tiny_model(), tmp_path / "model")
    (folder / "tokenizer.json").touch()
    (tmp_path / "broken_vision.py").write_text("raise RuntimeError('operator v::nms does not exist')")
    monkeypatch.syspath_prepend(str(tmp_path))

    def read(*args: Any, **kwargs: Any) -> None:
        try:
            __import__("broken_vision")
        except RuntimeError as error:
            raise ModuleNotFoundError("Could not import module 'LlamaConfig'.") from error

    monkeypatch.setattr(getattr(transformers, auto), "from_pretrained", read)
    with pytest.raises(MissingExtraError, match=r"v::nms does not exist\): repair the package 'broken_vision'"):
        load_config(folder) if auto == "AutoConfig" else load_tokenizer(folder)
