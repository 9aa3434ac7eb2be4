"""Writes a packed model: a shard for each block, in the names and with the other tensors of the original folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from sparsebit.folders import write_text
from sparsebit.llm.checkpoint.compressed_tensors import layer_tensors, make_config
from sparsebit.llm.checkpoint.finished_block import FinishedBlock
from sparsebit.llm.checkpoint.layer_format import LayerFormat
from sparsebit.llm.models.file_checksums import CHECKSUMS
from sparsebit.llm.models.shards import Shards
from sparsebit.llm.models.skeleton import Skeleton

_NOT_COPIED = (CHECKSUMS, ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")

_TEMPLATES = "additional_chat_templates"  # where transformers keeps all but the usual one


def write_packed_folder(
    target: Path,
    skeleton: Skeleton,
    block_paths: Sequence[str],
    block_of: Callable[[int], FinishedBlock],
    formats: Mapping[str, LayerFormat],
    ignored: Sequence[str],
) -> None:
    """Write config, tokenizer and shards to `target`; one block is in memory at a time.

    `block_of(number)`: returns a finished block. `formats`: of all layers by module name.
    """
    target.mkdir(parents=True, exist_ok=True)
    copy_small_files(skeleton.folder.path, target)
    config = {**skeleton.folder.config, "quantization_config": make_config(formats, ignored)}
    write_text(target / "config.json", json.dumps(config, indent=2) + "\n")
    replaced = {skeleton.names[f"{name}.weight"] for name in formats}
    owner = _block_of_file(skeleton, block_paths)
    shards = Shards(target, len(block_paths) + 1)
    for number in range(-1, len(block_paths)):  # -1: what is in no block
        names = [name for name in skeleton.folder if owner.get(name, -1) == number and name not in replaced]
        tensors: dict[str, Tensor] = {name: skeleton.folder.tensor(name) for name in names}
        if number >= 0:
            tensors |= _made(skeleton, block_paths[number], block_of(number))
        shards.write(tensors)
        skeleton.folder.close()
    shards.finish()


def _made(skeleton: Skeleton, path: str, block: FinishedBlock) -> dict[str, Tensor]:
    """The packed layers of a block, and its other tensors that have changed, by their names in the files."""
    tensors = {
        skeleton.names[f"{path}.{name}"]: skeleton.in_files(f"{path}.{name}", value)
        for name, value in block.others.items()
    }
    for name, packed in block.layers.items():
        tensors |= layer_tensors(skeleton.names[f"{path}.{name}.weight"].removesuffix(".weight"), packed)
    return tensors


def _block_of_file(skeleton: Skeleton, block_paths: Sequence[str]) -> dict[str, int]:
    """The number of the block that each tensor of the files belongs to."""
    found: dict[str, int] = {}
    for model_name, file_name in skeleton.names.items():
        for number, path in enumerate(block_paths):
            if model_name.startswith(f"{path}."):
                found[file_name] = number
    return found


def copy_small_files(source: Path, target: Path) -> None:
    """Copy every file without weights: tokenizer, generation config, chat templates, licence."""
    if (source / _TEMPLATES).is_dir():
        shutil.copytree(source / _TEMPLATES, target / _TEMPLATES, dirs_exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name != "config.json" and not path.name.endswith(_NOT_COPIED):
            shutil.copyfile(path, target / path.name)
