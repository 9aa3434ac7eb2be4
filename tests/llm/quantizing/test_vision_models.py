"""The language part of models that read images: calibrated with both, read by plain transformers with equal logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sparsebit.errors import ConfigError
from sparsebit.llm import Recipe, load, load_streamed, quantize
from sparsebit.llm.converting.load_check import relative_difference
from sparsebit.llm.models.architectures import LANGUAGE_PARTS, known_row
from sparsebit.llm.models.model_folder import ModelFolder
from tests.llm.tiny_models import saved, tiny_model
from tests.llm.tiny_vision_models import TYPES, batches, tiny_vision_model
from tests.parameters import first_fast

pytest.importorskip("compressed_tensors")
W4A8 = Recipe("gptq", 4, 32, True, activations="int8-static", smooth=True)


@torch.no_grad()
def logits(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    found: torch.Tensor = model(**batch, use_cache=False).logits
    return found


@pytest.mark.parametrize("model_type", first_fast(TYPES, 2))
def test_written_and_read(tmp_path: Path, model_type: str) -> None:
    folder, given = saved(tiny_vision_model(model_type), tmp_path / "model"), batches(model_type)
    made = quantize(folder, tmp_path / "made", W4A8, given)
    assert made.check is not None and made.check.difference < 1e-4  # transformers, with an image in the text
    assert made.formats.keys() == {
        f"{LANGUAGE_PARTS[model_type]}.{number}.{name}" for number in range(2) for name in _LAYERS
    }
    before, after = ModelFolder(folder), ModelFolder(made.folder)
    towers = [name for name in before if "vision" in name or "visual" in name]
    assert towers and all(torch.equal(before.tensor(name), after.tensor(name)) for name in towers)
    ours, plain = load(made.folder), load(folder)
    found, wanted = logits(ours, given[1]), logits(plain, given[1])
    assert torch.equal(logits(load_streamed(made.folder), given[1]), found)
    assert 1e-3 < relative_difference(found, wanted) < 0.6
    other = {**given[1], "pixel_values": -given[1]["pixel_values"]}
    assert relative_difference(logits(ours, other), found) > 1e-3  # the image is read


_LAYERS = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]


def test_layers_that_read_one_input_are_known(tmp_path: Path) -> None:
    row = known_row(tiny_vision_model("smolvlm"))
    assert row is not None and row.stages is not None and len(row.stages) == 4


def test_images_count(tmp_path: Path) -> None:
    """Calibrated with other images, the scales of inputs are others."""
    folder, given = saved(tiny_vision_model("llava"), tmp_path / "model"), batches("llava")
    recipe = Recipe("rtn", 8, 0, True, "none", activations="int8-static")
    larger = [{**batch, "pixel_values": 30 * batch["pixel_values"]} for batch in given[:-1]]
    scales = []
    for number, one in enumerate((given, larger)):
        made = quantize(folder, tmp_path / f"made{number}", recipe, one)
        layer: Any = load(made.folder).get_submodule("model.language_model.layers.0.self_attn.o_proj")
        scales.append(layer.inputs.scale)
    assert scales[0] != scales[1]


def test_a_run_continues(tmp_path: Path) -> None:
    from tests.llm.tiny_models import stopped_after

    folder, given = saved(tiny_vision_model("smolvlm"), tmp_path / "model"), batches("smolvlm")
    whole = quantize(folder, tmp_path / "whole", W4A8, given)
    with stopped_after(1):
        quantize(folder, tmp_path / "made", W4A8, given)
    made = quantize(folder, tmp_path / "made", W4A8, given)
    assert made.num_resumed == 1
    first, second = ModelFolder(whole.folder), ModelFolder(made.folder)
    assert [*first] == [*second] and all(torch.equal(first.tensor(name), second.tensor(name)) for name in first)


def test_unknown_types_are_refused_by_name(tmp_path: Path) -> None:
    model = tiny_vision_model("llava")
    folder = saved(model, tmp_path / "model")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"model_type": "llava"', '"model_type": "vipllava"'))
    with pytest.raises(ConfigError, match=r"'vipllava' reads images.*allowed: qwen2_5_vl, llava"):
        quantize(folder, tmp_path / "made", W4A8, batches("llava"))
    model.config.model_type = "vipllava"
    assert known_row(model) is None  # loading needs no row


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "no batches"),
        ([{"pixel_values": torch.zeros(1)}], "batch 0: .*with input_ids"),
        ([{"input_ids": [[1, 2]]}], r"batch 0: \['input_ids'\]"),
        ([torch.zeros(1, 4)], "batch 0"),
    ],
)
def test_batches_that_are_refused(tmp_path: Path, given: Any, words: str) -> None:
    folder = saved(tiny_model(num_hidden_layers=1), tmp_path / "model")
    with pytest.raises(ConfigError, match=words):
        quantize(folder, tmp_path / "made", W4A8, given)


@pytest.mark.parametrize(
    "recipe", [Recipe("autoround", 4, 32, True), Recipe(kv_cache="int8"), Recipe(group_size=32, rotate=True)]
)
def test_recipes_that_are_refused(tmp_path: Path, recipe: Recipe) -> None:
    folder = saved(tiny_vision_model("llava"), tmp_path / "model")
    with pytest.raises(ConfigError, match="with images: not supported"):
        quantize(folder, tmp_path / "made", recipe, batches("llava"))
