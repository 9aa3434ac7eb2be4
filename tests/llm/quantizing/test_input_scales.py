"""Folders whose layers round their inputs: written, loaded by plain transformers, with the logits of both equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.llm import Calibration, FloatLinear, QuantLinear, Recipe, load, load_streamed, quantize
from sparsebit.llm.converting.load_check import relative_difference
from sparsebit.llm.quantizing.input_scales import FACTORS, clipped_ranges, input_ranges
from tests.llm.tiny_models import saved, tiny_model, with_tokenizer, write_text
from tests.parameters import first_fast

pytest.importorskip("compressed_tensors")
TOKENS = torch.randint(3, 96, (1, 20), generator=torch.Generator().manual_seed(1))
RECIPES = {
    "int8, int8 inputs": Recipe("rtn", 8, 0, True, "none", activations="int8"),
    "nvfp4, nvfp4 inputs": Recipe("nvfp4", activations="nvfp4"),
    "int4, int8 inputs": Recipe("rtn", 4, 32, True, "none", activations="int8"),
    "fp8, constant": Recipe("fp8", activations="fp8-static"),
    "int8, constant": Recipe("rtn", 8, 0, True, "none", activations="int8-static"),
    "mxfp4, mxfp4 inputs": Recipe("mxfp4", activations="mxfp4"),
    "int4, fp8 inputs": Recipe("rtn", 4, 32, True, "none", activations="fp8"),
    "int4 gptq, constant fp8 inputs": Recipe("gptq", 4, 32, True, activations="fp8-static"),
    "nvfp4 by gptq, nvfp4 inputs": Recipe("nvfp4", activations="nvfp4", compensate=True),
    "int4 rotated, int8 inputs": Recipe("rtn", 4, 32, True, "none", rotate=True, activations="int8"),
}


def source(tmp_path: Path, **more: Any) -> tuple[Path, Calibration]:
    folder = with_tokenizer(saved(tiny_model(num_hidden_layers=2, **more), tmp_path / "model"))
    return folder, Calibration(write_text(tmp_path / "text.txt"), num_samples=8, length=32)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(TOKENS, use_cache=False).logits
    return found


@pytest.mark.parametrize("name", first_fast(RECIPES, 3))
def test_written_and_read(tmp_path: Path, name: str) -> None:
    folder, calibration = source(tmp_path)
    recipe = RECIPES[name]
    made = quantize(folder, tmp_path / "made", recipe, calibration)
    assert made.check is not None and made.check.difference < 1e-4  # transformers, with its own rounding of inputs
    assert {layer.inputs for layer in made.formats.values()} == {recipe.inputs}
    model = load(made.folder)
    assert torch.equal(logits(load_streamed(made.folder)), logits(model))
    rounded = logits(model)
    for part in model.modules():
        if isinstance(part, QuantLinear | FloatLinear):
            part.inputs = None
    assert relative_difference(logits(model), rounded) > 2e-3  # so that the check has something to see


def test_experts(tmp_path: Path) -> None:
    folder = with_tokenizer(saved(tiny_model("mixtral", num_hidden_layers=1), tmp_path / "model"))
    with pytest.raises(ConfigError, match="rounded inputs of experts"):
        quantize(folder, tmp_path / "made", RECIPES["int8, int8 inputs"])


def test_constant_scales_are_those_of_the_largest_input(tmp_path: Path) -> None:
    folder, calibration = source(tmp_path)
    made = quantize(folder, tmp_path / "made", RECIPES["int8, constant"], calibration)
    text = json.loads((made.folder / "model.safetensors.index.json").read_text())
    assert sum(name.endswith("input_scale") for name in text["weight_map"]) == len(made.formats)
    scales = {
        tuple(
            layer.inputs.scale
            for name, layer in load(made.folder).named_modules()
            if isinstance(layer, QuantLinear) and layer.inputs and name.endswith(group)
        )
        for group in ("q_proj", "k_proj", "v_proj")
    }
    assert len(scales) == 1 and len(next(iter(scales))) == 2  # layers that read one input share its scale


def test_ranges_by_hand(tmp_path: Path) -> None:
    folder, calibration = source(tmp_path)
    made = quantize(folder, tmp_path / "made", Recipe("rtn", 8, 0, True, "none"), calibration)
    ranges = input_ranges(load_streamed(made.folder), TOKENS, 1)
    assert ranges.keys() == made.formats.keys()
    model, seen = load(made.folder), []
    model.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].abs().max()))
    logits(model)
    assert ranges["model.layers.1.mlp.down_proj"] == float(seen[0])
    model.get_input_embeddings().weight.data[:] = torch.nan
    with pytest.raises(CalibrationError, match=r"layers\.0\.self_attn\.q_proj gets inputs that are not finite"):
        input_ranges(model, TOKENS, 1)


def test_ranges_are_clipped_where_that_helps(tmp_path: Path) -> None:
    folder, calibration = source(tmp_path)
    made = quantize(folder, tmp_path / "made", Recipe("rtn", 8, 0, True, "none"), calibration)
    model = load_streamed(made.folder)
    ranges = {name: 20 * found for name, found in input_ranges(model, TOKENS, 1).items()}
    inputs = RECIPES["int8, constant"].inputs
    assert inputs is not None
    found = clipped_ranges(model, inputs, ranges, TOKENS, 1)
    assert all(found[name] / ranges[name] == pytest.approx(min(FACTORS)) for name in ranges)
    stages = {name: found[name] for name in found if name.startswith("model.layers.1.self_attn")}
    assert len(stages) == 4 and len(set(stages.values())) == 2  # q, k and v have one


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"method": "rtn", "activations": "int8"}, "without zero points are needed"),
        ({"method": "rtn", "bits": 8, "symmetric": True, "activations": "int8"}, "group_size=0"),
        ({"bits": 8, "symmetric": True, "group_size": 0, "activations": "fp8"}, "give method='fp8'"),
        ({"method": "rtn", "activations": "nvfp4"}, "give method='nvfp4'"),
        ({"method": "nvfp4", "activations": "fp8"}, "allowed: float or nvfp4"),
        ({"method": "fp8", "activations": "float"}, "allowed: fp8 or fp8-static"),
        ({"smooth": True}, "with rounded activations"),
        ({"compensate": True}, "it is for fp8, mxfp4 and nvfp4"),
        ({"method": "mxfp4", "sweeps": 3}, "sweeps with method='mxfp4'"),
    ],
)
def test_recipes_that_no_server_runs(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Recipe(**given)


def test_transposed_layers(tmp_path: Path) -> None:
    """GPT-2 has `Conv1D` layers; the check compares weights, since only Sparsebit reads them packed."""
    model = tiny_model("gpt2", n_embd=64, n_layer=1, n_head=4, n_positions=128)
    folder = with_tokenizer(saved(model, tmp_path / "model"))
    made = quantize(folder, tmp_path / "made", RECIPES["int8, int8 inputs"])
    layers = [part for part in load(made.folder).modules() if isinstance(part, QuantLinear)]
    assert len(layers) == 12 and all(layer.inputs is not None for layer in layers)


def test_with_a_packed_cache(tmp_path: Path) -> None:
    folder, calibration = source(tmp_path)
    recipe = Recipe("rtn", 8, 0, True, "none", activations="int8-static", kv_cache="fp8")
    made = quantize(folder, tmp_path / "made", recipe, calibration)
    assert made.check is not None and made.check.difference < 1e-3


def test_codes_in_bytes_are_counted_so(tmp_path: Path) -> None:
    folder, _ = source(tmp_path)
    made = quantize(folder, tmp_path / "made", RECIPES["int4, int8 inputs"])
    assert made.bits_per_weight == 8.5  # and a float16 scale for 32 columns


def test_text_is_needed(tmp_path: Path) -> None:
    folder, _ = source(tmp_path)
    with pytest.raises(ConfigError, match="needs calibration text for its scales"):
        quantize(folder, tmp_path / "made", RECIPES["nvfp4, nvfp4 inputs"])


@pytest.mark.parametrize("method", ["gptq", "rtn", pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_smoothing_brings_the_logits_nearer(tmp_path: Path, method: Any) -> None:
    """Channels that a norm makes large are what smoothing is for."""
    model = tiny_model(num_hidden_layers=2)
    for layer in model.model.layers:
        layer.input_layernorm.weight.data[5] *= 60
        layer.post_attention_layernorm.weight.data[7] *= 60
    folder = with_tokenizer(saved(model, tmp_path / "model"))
    calibration = Calibration(write_text(tmp_path / "text.txt"), num_samples=16, length=32)
    given: dict[str, Any] = {"bits": 8, "group_size": 0, "symmetric": True, "activations": "int8"}
    given = {"activations": "nvfp4"} if method == "nvfp4" else given
    expected, errors = logits(load(folder)), []
    for smooth in (False, True):
        recipe = Recipe(method, **given, smooth=smooth)
        made = quantize(folder, tmp_path / f"made{smooth}", recipe, calibration)
        assert made.check is not None and made.check.difference < 1e-4
        assert bool(made.scaled_inputs) == smooth
        errors.append(relative_difference(logits(load(made.folder)), expected))
    assert errors[1] < 0.8 * errors[0]
