"""Subclasses of nn.Linear that are packed, and architectures that are refused before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from sparsebit.errors import ConfigError, DeploymentError
from sparsebit.llm import Calibration, QuantLinear, Recipe, load, quantize
from sparsebit.llm.converting.load_check import relative_difference
from sparsebit.llm.models.architectures import is_linear, need_called_layers, need_loadable_layers
from tests.llm.tiny_models import loaded, saved, tiny_model, with_tokenizer, write_text

NEAREST = Recipe("rtn", 8, group_size=32, scale_search="none")


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_the_linear_layers_of_falcon_are_packed(method: str, tmp_path: Path) -> None:
    folder = with_tokenizer(saved(tiny_model("falcon"), tmp_path / "model"))
    text = Calibration(write_text(tmp_path / "text.txt"), 16, 64)
    recipe = NEAREST if method == "rtn" else Recipe(bits=8, group_size=32)
    made = quantize(folder, tmp_path / "packed", recipe, text, check=False)
    model = load(made.folder)
    assert len(made.formats) == 12 and sum(isinstance(part, QuantLinear) for part in model.modules()) == 12
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        assert relative_difference(model(tokens).logits, loaded(folder)(tokens).logits) < 0.05


def test_other_subclasses_are_not_taken_for_linear_layers() -> None:
    class Scaled(nn.Linear):
        pass

    assert is_linear(nn.Linear(2, 2)) and not is_linear(Scaled(2, 2))


def test_code_that_reads_weights_is_refused_first(tmp_path: Path) -> None:
    folder = saved(tiny_model("mamba"), tmp_path / "model")
    with pytest.raises(ConfigError, match=r"reads the weight of backbone\.layers\.0\.mixer\.dt_proj"):
        quantize(folder, tmp_path / "packed", NEAREST, check=False)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("model_type", ["falcon", "mamba2"])
def test_a_class_that_initializes_packed_weights_is_named(model_type: str) -> None:
    model = tiny_model(model_type).to("meta")
    names = [name for name, part in model.named_modules() if (is_linear(part) and "layers" in name) or ".h." in name]
    names = [name for name in names if is_linear(model.get_submodule(name))]
    need_called_layers(model, names)
    with pytest.raises(DeploymentError, match=r"initializes weights .*--no-check"):
        need_loadable_layers(model, names)
    assert all(is_linear(model.get_submodule(name)) and name + ".weight" in model.state_dict() for name in names)


def test_a_usual_model_passes() -> None:
    model = tiny_model("llama").to("meta")
    names = [name for name, part in model.named_modules() if is_linear(part) and name != "lm_head"]
    need_called_layers(model, names)
    need_loadable_layers(model, names)
    assert len(names) == 21 and set(model.state_dict()) == set(tiny_model("llama").state_dict())
