"""Architectures: each row names the modules of transformers, and says what running a block shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from sparsebit.errors import ConfigError
from sparsebit.llm.models.architectures import (
    ARCHITECTURES,
    Architecture,
    architecture_of,
    blocks_of,
    linears,
    stages_of,
)
from sparsebit.llm.models.model_folder import ModelFolder
from sparsebit.llm.models.skeleton import Skeleton
from tests.llm.tiny_models import saved, tiny_model

TYPES = sorted(ARCHITECTURES)


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("number", [0, 1])
def test_a_row_is_what_running_a_block_shows(model_type: str, number: int, tmp_path: Path) -> None:
    skeleton = Skeleton(ModelFolder(saved(tiny_model(model_type), tmp_path)))
    skeleton.fill("")
    model = skeleton.model
    row = architecture_of(model)
    blocks = blocks_of(model, row)
    found = stages_of(blocks[number], lambda: model(torch.arange(3, 13)[None], use_cache=False))
    stages = row.stages_in(blocks[number])
    assert stages is not None
    assert {frozenset(stage) for stage in found} == {frozenset(stage) for stage in stages}
    assert len(blocks) == 3
    assert {name for stage in stages for name in stage} == set(linears(blocks[number]))


@pytest.mark.parametrize("model_type", TYPES)
def test_walking_finds_the_blocks_of_a_row(model_type: str) -> None:
    model = tiny_model(model_type)
    model.config.model_type = "something-new"
    assert architecture_of(model) == Architecture(ARCHITECTURES[model_type].blocks)


def test_fused_groups_have_two_layers_or_more() -> None:
    row = ARCHITECTURES["llama"]
    assert row.stages is not None
    assert [len(group) for group in row.fused_groups(row.stages)] == [3, 2]
    phi = ARCHITECTURES["phi"]
    assert phi.stages is not None
    assert phi.fused_groups(phi.stages) == (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),)


def test_a_row_that_does_not_fit_is_refused() -> None:
    model = tiny_model("phi3")
    model.config.model_type = "llama"
    with pytest.raises(ConfigError, match=r"no linear layers self_attn\.q_proj.*it has self_attn\.o_proj"):
        architecture_of(model)


def test_no_blocks_at_all() -> None:
    with pytest.raises(ConfigError, match="add a row"):
        architecture_of(nn.Sequential(nn.Linear(2, 2)))


def test_stacked_experts_are_refused() -> None:
    model = tiny_model("mixtral")
    with pytest.raises(ConfigError, match=r"stacked weights \(mlp\.experts\.gate_up_proj"):
        linears(model.model.layers[0])


def test_a_layer_that_is_called_twice_is_refused() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.fc(x))  # type: ignore[no-any-return]

    block = Twice()
    with pytest.raises(ConfigError, match="calls fc more than once"):
        stages_of(block, lambda: block(torch.ones(1, 4)))
