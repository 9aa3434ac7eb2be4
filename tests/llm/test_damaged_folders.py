"""Folders that are damaged, shapes that are unusual, texts that are too short: each is refused in words, or works."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsebit.errors import CheckpointError, ConfigError
from sparsebit.folders import alone_in
from sparsebit.llm import Calibration, Recipe, load, quantize
from sparsebit.llm.models.file_checksums import CHECKSUMS
from tests.llm.tiny_models import saved, tiny_model, with_tokenizer, write_text

pytest.importorskip("compressed_tensors")
FAST = Recipe(method="rtn", scale_search="none", group_size=32)
INDEX = "model.safetensors.index.json"


def model_folder(tmp_path: Path, dtype: torch.dtype = torch.float16, **changes: Any) -> Path:
    write_text(tmp_path / "text.txt")
    return with_tokenizer(saved(tiny_model(**changes), tmp_path / "model", dtype=dtype))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        (torch.bfloat16, {"tie_word_embeddings": True}),
        (torch.float32, {"head_dim": 32}),  # 4 heads of 32 beside 64 hidden channels
        (torch.float16, {"vocab_size": 131, "tie_word_embeddings": True}),
    ],
    ids=["tied bfloat16", "wide heads", "odd vocabulary"],
)
def test_unusual_models(tmp_path: Path, dtype: torch.dtype, changes: dict[str, Any]) -> None:
    source = model_folder(tmp_path, dtype, **changes)
    text = Calibration(tmp_path / "text.txt", num_samples=4, length=24)
    made = quantize(source, tmp_path / "packed", Recipe(bits=3, group_size=32), text)
    assert made.check is not None and made.check.difference <= 1e-3


def _change_index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def _second(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[1]


def _first(folder: Path) -> Path:
    """A file that does not hold the last norm."""
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    return next(folder / name for name in sorted(index.values()) if name != index["model.norm.weight"])


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing file": (lambda folder: _second(folder).unlink(), "is not in the folder"),
    "truncated": (lambda f: _second(f).write_bytes(_second(f).read_bytes()[:-100]), "cannot be read"),
    "broken header": (lambda f: _second(f).write_bytes(b"\xff" * 8 + _second(f).read_bytes()[8:]), "cannot be read"),
    "empty file": (lambda folder: _second(folder).write_bytes(b""), "cannot be read"),
    "unknown tensor": (
        lambda folder: _change_index(
            folder, lambda entries: entries.update({"model.norm.weight": _first(folder).name})
        ),
        "does not contain tensor",
    ),
    "index is no JSON": (lambda folder: (folder / INDEX).write_text("{"), "cannot be read"),
    "config is no JSON": (lambda folder: (folder / "config.json").write_text("{"), "cannot be read"),
}


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("is_packed", [False, True], ids=["float", "packed"])
def test_a_damaged_folder_is_named(tmp_path: Path, name: str, is_packed: bool) -> None:
    source = model_folder(tmp_path)
    damage, message = DAMAGES[name]
    if is_packed:
        folder = quantize(source, tmp_path / "packed", FAST, check=False).folder
        damage(folder)
        with pytest.raises(CheckpointError, match=f"damaged or missing|{message}"):
            load(folder)
        (folder / CHECKSUMS).unlink()  # as a folder of another tool
        with pytest.raises(CheckpointError, match=message):
            load(folder)
        return
    damage(source)
    with pytest.raises(CheckpointError, match=message):
        quantize(source, tmp_path / "packed", FAST)
    assert not (tmp_path / "packed").exists()


@pytest.mark.parametrize("text", ["", "\n\n\n", "a", "ab\n\n\ncd", "日本語 ελ 🙂\n"], ids=ascii)
def test_a_text_shorter_than_a_window_is_refused(tmp_path: Path, text: str) -> None:
    source = model_folder(tmp_path)
    (tmp_path / "short.txt").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"give more text|characters are visible"):
        quantize(source, tmp_path / "packed", Recipe(), Calibration(tmp_path / "short.txt", num_samples=2, length=24))


def test_a_second_process_on_the_same_output_is_refused(tmp_path: Path) -> None:
    source, partial = model_folder(tmp_path), tmp_path / "packed.partial"
    partial.mkdir()
    (partial / ".run.json.sparsebit-0").touch()  # the other one begins just now
    with alone_in(partial), pytest.raises(CheckpointError, match="another process works in"):
        quantize(source, tmp_path / "packed", FAST, check=False)
    assert partial.is_dir() and not (tmp_path / "packed").exists()
    (partial / ".run.json.sparsebit-0").unlink()
    assert quantize(source, tmp_path / "packed", FAST, check=False).folder.is_dir()
    assert not partial.exists()


def test_a_second_process_leaves_the_rotated_model_of_the_first_alone(tmp_path: Path) -> None:
    source, partial, rotated = model_folder(tmp_path), tmp_path / "packed.partial", tmp_path / "packed.rotated"
    partial.mkdir()
    rotated.mkdir()
    for name in ("rotation.json", "model.safetensors"):
        (rotated / name).touch()
    with alone_in(partial), pytest.raises(CheckpointError, match="another process works in"):
        quantize(source, tmp_path / "packed", replace(FAST, rotate=True), check=False)
    assert len(list(rotated.iterdir())) == 2


def test_a_run_that_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    source = model_folder(tmp_path)
    before = sorted(tmp_path.iterdir())
    text = tmp_path / "missing.txt"
    with pytest.raises(ConfigError, match="does not exist"):
        quantize(source, tmp_path / "new" / "packed", Recipe(group_size=32), Calibration(text), check=False)
    assert sorted(tmp_path.iterdir()) == before
