"""Folders of pruned models: written, read into the unpruned class, and refused where they do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparsebit.errors import CheckpointError
from sparsebit.sparse import load, save
from sparsebit.sparse.group_search import find_groups
from sparsebit.sparse.shrinking.pruned_folder import _checksum
from sparsebit.sparse.shrinking.surgery import apply_plan
from tests.sparse.nets import Attention, Chain, Tied, images, rows


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


def test_wrapped_models_are_saved_and_loaded(tmp_path: Path) -> None:
    small, batch = shrunk(Chain(), images()), images()
    save(nn.DataParallel(small), tmp_path / "model")
    assert torch.equal(load(tmp_path / "model", nn.DataParallel(Chain())).eval()(batch), small(batch))


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
    (folder / "channels.json").write_text(json.dumps({**description, "class": "other.Chain"}))
    with pytest.raises(CheckpointError, match="checksum differs from its content"):
        load(folder, Chain())
    (folder / "channels.json").write_text(json.dumps({**description, "format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        load(folder, Chain())
    (folder / "channels.json").write_text(json.dumps(description))
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="checksum"):
        load(folder, Chain())


class Versioned(nn.Module):
    """As MNASNet of torchvision: it refuses states that do not say by which version they were written."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
        if metadata.get("version") != 2:
            raise ValueError(f"version should be set to 1 or 2 instead of {metadata.get('version')}")
        super()._load_from_state_dict(state, prefix, metadata, *rest)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))


def rewritten(folder: Path, change: Callable[[dict[str, Any]], object], *, as_format: int | None = None) -> None:
    """Change the description as someone would who also writes its checksum, or as an earlier version."""
    description = json.loads((folder / "channels.json").read_text())
    del description["checksum"]
    change(description)
    if as_format is None:
        description["checksum"] = _checksum(description)
    else:
        description["format"] = as_format
    (folder / "channels.json").write_text(json.dumps(description))


def test_states_have_versions(tmp_path: Path) -> None:
    batch = rows()
    small = shrunk(Versioned(), batch)
    folder = save(small, tmp_path / "model")
    assert torch.equal(load(folder, Versioned())(batch), small(batch))
    rewritten(folder, lambda description: description.pop("versions"), as_format=1)  # of an earlier version
    assert torch.equal(load(folder, Versioned())(batch), small(batch))
    rewritten_format = json.loads((folder / "channels.json").read_text()) | {"format": 2}
    (folder / "channels.json").write_text(json.dumps(rewritten_format))
    with pytest.raises(CheckpointError, match="checksum"):
        load(folder, Versioned())


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "change",
    [
        lambda plan: plan.pop("kept"),
        lambda plan: plan["kept"].update({"a.weight": {"0": [[0]]}}),
        lambda plan: plan["kept"].update({"a.weight": {"0": [[5, 2]]}}),
        lambda plan: plan["kept"].update({"a.weight": {"0": [[0, 10**12]]}}),
        lambda plan: plan["kept"].update({"a.weight": {"0": []}}),
        lambda plan: plan["kept"].update({"a.weight": {"7": [[0, 1]]}}),
        lambda plan: plan["kept"].update({"a.weight": {"-1": [[0, 1]]}}),
        lambda plan: plan["kept"].update({"a.weight": {"0": [[-2, 3]]}}),
        lambda plan: plan["attributes"].update({"nothing": {"width": 3}}),
        lambda plan: plan["attributes"].update({"a": {"nothing": 3}}),
        lambda plan: plan["spread"].update({"nothing": ["in"]}),
        lambda plan: plan["skipped"].append("nothing"),
        lambda plan: plan["computed"].update({"nothing": "plain"}),
        lambda plan: plan["computed"].update({"a": "strange"}),
    ],
)
def test_a_damaged_plan_is_a_clear_error(change: Callable[[dict[str, Any]], object], tmp_path: Path) -> None:
    folder = save(shrunk(Versioned(), rows()), tmp_path / "model")
    rewritten(folder, lambda description: change(description["plan"]))
    with pytest.raises(CheckpointError, match=r"model.*(plan|fit)"):
        load(folder, Versioned())


def test_a_plan_nested_too_deeply_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "channels.json").write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(tmp_path, nn.Linear(2, 2))


def test_aliases_of_nothing_are_a_clear_error(tmp_path: Path) -> None:
    folder = save(shrunk(Versioned(), rows()), tmp_path / "model")
    rewritten(folder, lambda description: description["aliases"].update({"a.weight": "nothing"}))
    with pytest.raises(CheckpointError, match="nothing"):
        load(folder, Versioned())


def test_what_is_not_a_tensor_is_not_saved(tmp_path: Path) -> None:
    class Extra(Versioned):
        def get_extra_state(self) -> dict[str, int]:
            return {"a": 1}

        def set_extra_state(self, state: Any) -> None:
            del state

    with pytest.raises(CheckpointError, match="_extra_state is not a tensor"):
        save(shrunk(Extra(), rows()), tmp_path / "model")
