"""Skeletons: filled part by part they compute what transformers computes, for every architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparsebit.errors import CheckpointError
from sparsebit.llm.models.architectures import ARCHITECTURES
from sparsebit.llm.models.model_folder import ModelFolder
from sparsebit.llm.models.separate_experts import experts_in
from sparsebit.llm.models.skeleton import Skeleton, restore_buffers
from tests.llm.tiny_models import loaded, saved, tiny_model

TOKENS = torch.arange(3, 35)[None]


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_filled_it_is_the_model(model_type: str, tmp_path: Path) -> None:
    skeleton = Skeleton(ModelFolder(saved(tiny_model(model_type), tmp_path)))
    assert all(parameter.is_meta for parameter in skeleton.model.parameters())
    skeleton.fill("")
    with torch.no_grad():
        ours, theirs = skeleton.model(TOKENS).logits, loaded(tmp_path)(TOKENS).logits
    if experts_in(skeleton.model):  # sums in another order
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(ours, theirs)


def test_parts_are_filled_and_emptied(tmp_path: Path) -> None:
    skeleton = Skeleton(ModelFolder(saved(tiny_model(), tmp_path)))
    block = skeleton.fill("model.layers.1")
    assert not any(parameter.is_meta for parameter in block.parameters())
    assert all(parameter.is_meta for parameter in skeleton.model.model.layers[0].parameters())
    skeleton.empty("model.layers.1")
    assert all(parameter.is_meta for parameter in block.parameters())
    skeleton.fill("", without=["model.layers", "lm_head"])
    assert not skeleton.model.model.embed_tokens.weight.is_meta
    assert skeleton.model.model.layers[0].mlp.down_proj.weight.is_meta


def test_a_bare_decoder_lacks_the_prefix(tmp_path: Path) -> None:
    model = tiny_model()
    model.model.config.architectures = ["LlamaForCausalLM"]
    model.model.save_pretrained(tmp_path)
    skeleton = Skeleton(ModelFolder(tmp_path))
    block: Any = skeleton.fill("model.layers.0")
    assert torch.equal(block.mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = ModelFolder(saved(tiny_model(), tmp_path))
    del folder.files["model.layers.2.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"no tensor for model\.layers\.2\.mlp\.up_proj\.weight"):
        Skeleton(folder).fill("model.layers.2")
    with pytest.raises(CheckpointError, match="no tensor 'nothing'"):
        folder.tensor("nothing")


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    folder = ModelFolder(saved(tiny_model(), tmp_path))
    name = "model.layers.0.mlp.up_proj.weight"
    folder.files[name] = folder.files["model.norm.weight"]
    folder.tensor = lambda name: torch.zeros(3)  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match=r"has the shape \(3,\), and the architecture wants"):
        Skeleton(folder).fill("model.layers.0.mlp")


def test_a_buffer_that_no_class_computes_again_is_refused() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(3.0), persistent=False)

        def _init_weights(self, module: nn.Module) -> None:
            pass

    with torch.device("meta"):
        model = Model()
    with pytest.raises(CheckpointError, match="computes table when it is built"):
        restore_buffers(model, model, torch.device("cpu"))


def test_first_values_that_are_not_on_the_meta_device_are_overwritten(tmp_path: Path) -> None:
    """DiffLlama draws some parameters with `torch.normal`, which ignores the device that is set around it."""
    model = tiny_model("diffllama", num_hidden_layers=1)
    skeleton = Skeleton(ModelFolder(saved(model, tmp_path, dtype=torch.float32)))
    assert all(parameter.is_meta for parameter in skeleton.model.parameters())
    skeleton.fill("")
    expected = model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in skeleton.model.state_dict().items())


def test_buffers_of_flags(tmp_path: Path) -> None:
    changes = {"num_hidden_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8}
    model = tiny_model("gpt_neo", **changes)
    tokens = torch.arange(3, 27)[None]
    skeleton = Skeleton(ModelFolder(saved(model, tmp_path, dtype=torch.float32)))
    with torch.no_grad():
        assert torch.equal(skeleton.fill("")(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64], ids=str)
def test_flags_and_numbers_that_no_class_computes_again_are_refused(dtype: torch.dtype) -> None:
    part = torch.nn.Module()
    part.register_buffer("table", torch.zeros(3, dtype=dtype, device="meta"), persistent=False)
    part._init_weights = lambda _: None  # type: ignore[assignment]
    with pytest.raises(CheckpointError, match="computes table when it is built"):
        restore_buffers(part, part, torch.device("cpu"))


class TestFolder:
    def test_reads_one_file_or_several(self, tmp_path: Path) -> None:
        model = tiny_model()
        several = ModelFolder(saved(model, tmp_path / "several"))
        model.half().save_pretrained(tmp_path / "one")
        one = ModelFolder(tmp_path / "one")
        assert len(set(several.files.values())) > 3
        assert len(set(one.files.values())) == 1
        assert one.shapes() == several.shapes()
        assert all(torch.equal(one.tensor(name), several.tensor(name)) for name in one)

    def test_pickles_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "pytorch_model.bin").write_bytes(b"")
        with pytest.raises(CheckpointError, match="is a pickle"):
            ModelFolder(tmp_path)

    def test_what_is_no_model(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="not a folder"):
            ModelFolder(tmp_path / "nowhere")
        with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
            ModelFolder(tmp_path)

    def test_a_missing_or_damaged_file(self, tmp_path: Path) -> None:
        folder = saved(tiny_model(), tmp_path)
        files = sorted(folder.glob("*.safetensors"))
        files[1].write_bytes(b"not a file of tensors")
        damaged = ModelFolder(folder)
        with pytest.raises(CheckpointError, match="cannot be read"):
            [damaged.tensor(name) for name in damaged]
        files[1].unlink()
        with pytest.raises(CheckpointError, match="which is not in the folder"):
            ModelFolder(folder)
