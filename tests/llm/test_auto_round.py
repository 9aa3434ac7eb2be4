"""AutoRound's folders: its three layouts, exceptions by name and by pattern, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsebit.errors import CheckpointError
from sparsebit.llm import Recipe, convert, load, quantize
from sparsebit.llm.checkpoint.auto_round import read_config
from sparsebit.llm.checkpoint.layer_format import LayerFormat
from tests.llm.tiny_models import saved, tiny_model

TOKENS = torch.randint(3, 96, (1, 20), generator=torch.Generator().manual_seed(1))
CONFIG = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int"}


@pytest.mark.parametrize(
    ("layout", "method"),
    [("auto_round:auto_gptq", "gptq-v1"), ("auto_round:gptqmodel", "gptq"), ("auto_round:auto_awq", "awq")],
)
def test_layouts(tmp_path: Path, layout: str, method: str) -> None:
    folder = saved(tiny_model(num_hidden_layers=1), tmp_path / "model")
    recipe = Recipe("rtn", scale_search="none", group_size=32, symmetric=method != "awq")
    source = quantize(folder, tmp_path / "packed", recipe, check=False).folder
    made = convert(source, tmp_path / "made", method, check=False).output
    (made / "checksums.json").unlink()
    config = json.loads((made / "config.json").read_text())
    config["quantization_config"] = {**CONFIG, "sym": recipe.symmetric, "packing_format": layout}
    (made / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        assert torch.equal(load(made)(TOKENS).logits, load(source)(TOKENS).logits)


def test_exceptions() -> None:
    extra: dict[str, Any] = {
        "model.layers.0.mlp.up_proj": {"bits": 8, "group_size": -1},
        r"model\.layers\.[12]\..*\.down_proj": {"bits": 2, "sym": False},
    }
    names = ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]
    formats, suffixes, _ = read_config({**CONFIG, "extra_config": extra}, names)
    assert list(formats.values()) == [LayerFormat(8, 0, True), LayerFormat(4, 32, True), LayerFormat(2, 32, False)]
    assert suffixes[0] == "qweight"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"packing_format": "auto_round:fp8"}, "'auto_round:fp8' with int weights and activations of 16 bits"),
        ({"data_type": "mx_fp"}, "mx_fp weights"),
        ({"act_bits": 8}, "activations of 8 bits"),
    ],
)
def test_refusals(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_config({**CONFIG, **changes}, ["a"])
