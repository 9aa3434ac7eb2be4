"""`autoround`: it begins with the codes of rounding to nearest, learns better ones, and keeps them in the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from sparsebit.errors import ConfigError
from sparsebit.llm import Calibration, Recipe, load, quantize
from sparsebit.llm.quantizing.learned_rounding import LearnedLayer
from sparsebit.llm.quantizing.rounding import round_weight
from tests.llm.quantizing.test_quantize_folder import contents, logits
from tests.llm.tiny_models import loaded, saved, stopped_after, tiny_model, with_tokenizer, write_text

SMALL = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 8, "num_hidden_layers": 2}
RECIPE = Recipe("autoround", 2, 32, scale_search="none", steps=12)


def source_of(model: Any, folder: Path) -> Path:
    write_text(folder / "text.txt")
    return with_tokenizer(saved(model, folder / "model"))


def calibration(source: Path, num_samples: int = 10) -> Calibration:
    return Calibration(source.parent / "text.txt", num_samples=num_samples, length=24)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("kind", ["sign", "latent"])
def test_it_begins_where_the_weight_is(symmetric: bool, bits: int, kind: Literal["sign", "latent"]) -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    start = round_weight(weight, None, Recipe("rtn", bits, 32, symmetric), "layer", stored=torch.float16).packed
    layer = LearnedLayer(weight, start, kind)  # type: ignore[arg-type]
    torch.testing.assert_close(layer.weight(), start.dequantize(torch.float32))
    assert torch.equal(layer.packed().dequantize(torch.float32), start.dequantize(torch.float32))


def test_gradients_reach_offsets_and_ranges() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    start = round_weight(weight, None, Recipe("rtn", 3, 32), "layer", stored=torch.float16).packed
    layer = LearnedLayer(weight, start)  # type: ignore[arg-type]
    (layer.weight() * torch.randn(8, 64, generator=torch.Generator().manual_seed(1))).sum().backward()
    assert layer.learned.v.grad is not None and bool((layer.learned.v.grad != 0).float().mean() > 0.8)
    assert all(factor.grad is not None and bool(factor.grad.abs().sum() > 0) for factor in layer.learned.factors)


@pytest.mark.parametrize(
    ("recipe", "start"),
    [
        (RECIPE, Recipe("rtn", 2, 32, scale_search="none")),
        (Recipe("efficientqat", 2, 32, steps=60), Recipe("gptq", 2, 32)),
    ],
    ids=["autoround", "efficientqat"],
)
def test_end_to_end(recipe: Recipe, start: Recipe, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    source = source_of(tiny_model("llama", **SMALL), tmp_path)
    made = quantize(source, tmp_path / "packed", recipe, calibration(source))
    assert made.check is not None and made.check.difference <= 1e-3
    plain = quantize(source, tmp_path / "plain", start, calibration(source), check=False)
    wanted = logits(loaded(source))
    errors = [float((logits(load(folder)) - wanted).square().mean()) for folder in (made.folder, plain.folder)]
    assert errors[0] < errors[1]
    with stopped_after():
        quantize(source, tmp_path / "again", recipe, calibration(source), check=False)
    again = quantize(source, tmp_path / "again", recipe, calibration(source), check=False)
    assert again.num_resumed == 1
    assert contents(again.folder) == contents(made.folder)


def test_experts_learn_too(tmp_path: Path) -> None:
    model = tiny_model("mixtral", **{**SMALL, "num_hidden_layers": 1, "num_local_experts": 2})
    source = source_of(model, tmp_path)
    recipe = Recipe("autoround", 2, 32, symmetric=True, scale_search="none", steps=6)
    made = quantize(source, tmp_path / "packed", recipe, calibration(source), check=False)
    plain = quantize(source, tmp_path / "plain", Recipe("rtn", 2, 32, True, "none"), check=False)
    name = "model.layers.0.mlp.experts.0.w1"
    codes = [load(folder).get_submodule(name).qweight for folder in (made.folder, plain.folder)]
    assert made.experts[name].fallback is None and not torch.equal(*codes)


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="steps with method='gptq': these are of autoround and efficientqat"):
        Recipe(steps=10)
    with pytest.raises(ConfigError, match="steps=0"):
        Recipe("autoround", steps=0)
