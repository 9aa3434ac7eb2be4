"""Checksums beside the files of a folder: a bit that has changed is found by everything that loads the folder."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsebit.errors import CheckpointError
from sparsebit.llm import Recipe, convert, load, load_streamed, quantize
from sparsebit.llm.models.file_checksums import CHECKSUMS, check_files, write_checksums
from tests.llm.tiny_models import loaded, saved, tiny_model, with_tokenizer

pytest.importorskip("compressed_tensors")
FAST = Recipe(method="rtn", scale_search="none", group_size=32, symmetric=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    source = with_tokenizer(saved(tiny_model(), folder / "model"))
    return quantize(source, folder / "packed", FAST, check=False).folder


@pytest.fixture
def packed(made: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "packed"
    folder.mkdir()
    for path in made.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def flip(path: Path, position: int = -3) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("read", [
    load, load_streamed, lambda folder: convert(folder, folder.with_name("gptq"), "gptq", check=False),
    lambda folder: convert(folder, folder.with_name("file.gguf"), "gguf", check=False),
], ids=["load", "load_streamed", "convert", "gguf"])  # fmt: skip
def test_a_flipped_bit_of_a_shard_is_found(packed: Path, read: Any) -> None:
    if "gguf" in str(read.__code__.co_consts):
        pytest.importorskip("gguf")
    shard = sorted(packed.glob("*.safetensors"))[1]
    flip(shard)
    with pytest.raises(CheckpointError, match=f"{shard.name}: damaged"):
        read(packed)
    flip(shard)
    check_files(packed)


def test_transformers_loads_the_folder_beside_its_checksums(packed: Path) -> None:
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(packed)(tokens).logits, load(packed)(tokens).logits, rtol=1e-4, atol=1e-4)


def test_converted_folders_have_their_own(packed: Path) -> None:
    converted = convert(packed, packed.with_name("gptq"), "gptq", check=False).output
    check_files(converted)
    assert (converted / CHECKSUMS).read_text() != (packed / CHECKSUMS).read_text()
    flip(sorted(converted.glob("*.safetensors"))[0])
    with pytest.raises(CheckpointError, match="damaged"):
        load(converted)


def test_a_folder_without_checksums_is_loaded_as_it_is(packed: Path) -> None:
    (packed / CHECKSUMS).unlink()
    flip(sorted(packed.glob("*.safetensors"))[1])
    load(packed)


def test_an_edited_config_is_told_and_loaded(packed: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = packed / "config.json"
    config.write_text(config.read_text() + "\n")
    with caplog.at_level(logging.WARNING):
        load(packed)
    assert "config.json has changed" in caplog.text


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 1, "files": {}, "crc32": "00000000"}', '{"format": 9}'])
def test_damaged_checksums_are_told(packed: Path, content: str) -> None:
    (packed / CHECKSUMS).write_text(content)
    with pytest.raises(CheckpointError, match=CHECKSUMS):
        load(packed)


def test_missing_and_longer_files(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    (tmp_path / "notes.txt").write_bytes(b"")
    write_checksums(tmp_path)
    check_files(tmp_path)
    (tmp_path / "notes.txt").unlink()  # no weights
    check_files(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model.safetensors: damaged or missing"):
        check_files(tmp_path)
