"""Damage of a float model is found before the first block."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsebit.errors import CheckpointError
from sparsebit.llm import Recipe, load, quantize
from sparsebit.llm.models import skeleton
from sparsebit.llm.quantizing.block_rounding import BlockRounding
from sparsebit.tensor_files import load_tensors, save_tensors
from tests.llm.tiny_models import saved, tiny_model

NEAREST = Recipe("rtn", group_size=32, scale_search="none")


def change(name: str, edit: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Edits the file that holds the tensor."""

    def run(folder: Path) -> None:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        path = folder / index["weight_map"][name]
        tensors, metadata = load_tensors(path)
        tensors = {key: value.clone() for key, value in tensors.items()}
        edit(tensors)
        save_tensors(tensors, path, metadata)

    return run


def cut_last_file(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[-1]
    path.write_bytes(path.read_bytes()[:-100])


LAST, HEAD, NORM = "model.layers.2.mlp.down_proj.weight", "lm_head.weight", "model.norm.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_last_file, "cannot be read"),
        (change(LAST, lambda tensors: tensors.pop(LAST)), f"cannot be read .*{LAST}"),
        (change(LAST, lambda tensors: tensors.update({LAST: torch.ones(4, 4)})), r"shape \(4, 4\), and the"),
        (change(LAST, lambda tensors: tensors[LAST][-1, -1].fill_(torch.nan)), f"{LAST} has NaN or infinite"),
        (change(LAST, lambda tensors: tensors[LAST][0, 0].fill_(-torch.inf)), f"{LAST} has NaN or infinite"),
        (change(HEAD, lambda tensors: tensors[HEAD][5].fill_(torch.nan)), f"{HEAD} has NaN"),
        (change(NORM, lambda tensors: tensors[NORM][5].fill_(torch.inf)), f"{NORM} has NaN"),
    ],
    ids=["truncated", "missing in its file", "shape", "NaN", "infinity", "output layer", "vector"],
)
def test_damage_is_found_before_the_first_block(
    damage: Callable[[Path], None], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tiny_model(), tmp_path / "model")
    damage(folder)
    monkeypatch.setattr(BlockRounding, "round", _not_reached)
    monkeypatch.setattr(skeleton, "_CHUNK", 256)  # several parts of one tensor
    with pytest.raises(CheckpointError, match=message):
        quantize(folder, tmp_path / "packed", NEAREST, check=False)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_tensor_that_the_index_lacks(tmp_path: Path) -> None:
    folder = saved(tiny_model(), tmp_path / "model")
    index = folder / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    del found["weight_map"][LAST]
    index.write_text(json.dumps(found))
    with pytest.raises(CheckpointError, match=f"no tensor for {LAST}"):
        quantize(folder, tmp_path / "packed", NEAREST, check=False)


@pytest.mark.parametrize("chunk", [256, 1 << 24])
def test_weights_of_zeros_are_told(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a download that stopped leaves them: the file has its size, and what did not arrive is zero."""
    folder = saved(tiny_model(), tmp_path / "model")
    change(LAST, lambda tensors: tensors[LAST].zero_())(folder)
    monkeypatch.setattr(skeleton, "_CHUNK", chunk)
    quantize(folder, tmp_path / "packed", NEAREST, check=False)
    (told,) = [record.getMessage() for record in caplog.records if "zero" in record.getMessage()]
    assert f"1 weights are all zero ({LAST})" in told


def test_large_finite_values_pass(tmp_path: Path) -> None:
    folder = saved(tiny_model(), tmp_path / "model", dtype=torch.float32)
    change(LAST, lambda tensors: tensors[LAST][:8].fill_(3e38))(folder)  # their sum is infinite
    skeleton._need_finite(skeleton.ModelFolder(folder), LAST)


@pytest.mark.parametrize("num_layers", [2, 4], ids=["fewer", "more"])
def test_a_config_with_another_number_of_layers_is_refused(num_layers: int, tmp_path: Path) -> None:
    folder = saved(tiny_model(), tmp_path / "model")
    edit_config(folder, num_hidden_layers=num_layers)
    words = r"9 tensors of layers or experts .*model\.layers\.2\." if num_layers == 2 else "no tensor for"
    with pytest.raises(CheckpointError, match=words):
        quantize(folder, tmp_path / "packed", NEAREST, check=False)


def test_a_packed_folder_with_fewer_layers_in_its_config_is_refused(tmp_path: Path) -> None:
    made = quantize(saved(tiny_model(), tmp_path / "model"), tmp_path / "packed", NEAREST, check=False).folder
    edit_config(made, num_hidden_layers=2)
    with pytest.raises(CheckpointError, match="layers or experts that its config"):
        load(made)


def test_a_config_with_fewer_experts_is_refused(tmp_path: Path) -> None:
    folder = saved(tiny_model("mixtral"), tmp_path / "model")
    edit_config(folder, num_local_experts=2)
    with pytest.raises(CheckpointError, match=r"layers or experts that its config|the shape"):
        quantize(folder, tmp_path / "packed", Recipe("rtn", 4, 32, True, "none"), check=False)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    config.pop("layer_types", None)
    path.write_text(json.dumps(config))


def _not_reached(*_: Any, **__: Any) -> None:
    raise AssertionError("not to be reached")
