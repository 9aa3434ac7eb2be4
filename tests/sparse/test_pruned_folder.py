"""Folders of pruned models: written, read into the unpruned class, and refused where they do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from sparsebit.errors import CheckpointError
from sparsebit.sparse import load, save
from sparsebit.sparse.group_search import find_groups
from sparsebit.sparse.surgery import apply_plan
from tests.sparse.nets import Attention, Chain, Tied, images


def shrunk(model: nn.Module, batch: torch.Tensor) -> nn.Module:
    found = find_groups(model.eval(), batch)
    apply_plan(model, found.plan(group.units[0] for group in found.groups))
    return model


@pytest.mark.parametrize(
    ("kind", "batch"),
    [(Chain, images()), (Attention, torch.randn(2, 5, 12)), (Tied, torch.randint(0, 11, (2, 5)))],
    ids=["chain", "attention", "tied"],
)
def test_a_folder_rebuilds_the_model_from_the_unpruned_class(
    kind: type[nn.Module], batch: torch.Tensor, tmp_path: Path
) -> None:
    small = shrunk(kind(), batch)
    save(small, tmp_path / "model")
    original = kind()
    again = load(tmp_path / "model", original).eval()
    assert type(again) is kind
    assert torch.equal(again(batch), small(batch))
    assert {k: v.shape for k, v in original.state_dict().items()} == {
        k: v.shape for k, v in kind().state_dict().items()
    }
    if kind is Tied:
        assert again.head.weight is again.embed.weight
    with torch.no_grad():  # what was trained since is saved too, over the older one
        next(again.parameters()).add_(1)
    save(again, tmp_path / "model")
    assert torch.equal(load(tmp_path / "model", kind()).eval()(batch), again(batch))
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["channels.json", "model.safetensors"]


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no channel plan"):
        save(Chain(), tmp_path / "model")
    small = shrunk(Chain(), images())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="holds something else"):
        save(small, tmp_path / "other")
    folder = save(small, tmp_path / "model")
    with pytest.raises(CheckpointError, match="another model"):
        load(folder, Attention())
    with pytest.raises(CheckpointError, match="pruned already"):
        load(folder, small)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(tmp_path / "nothing", Chain())


def test_damage_is_seen(tmp_path: Path) -> None:
    folder = save(shrunk(Chain(), images()), tmp_path / "model")
    description = json.loads((folder / "channels.json").read_text())
    (folder / "channels.json").write_text(json.dumps({**description, "format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        load(folder, Chain())
    (folder / "channels.json").write_text(json.dumps(description))
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="checksum"):
        load(folder, Chain())
