"""`write_cache`: adds the number format of the cache to a packed folder, with scales of its own keys and values."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from sparsebit.errors import CheckpointError
from sparsebit.llm.caching.cache_kinds import LARGEST
from sparsebit.llm.caching.cache_ranges import attention_paths, cache_ranges
from sparsebit.llm.caching.cache_scheme import with_cache
from sparsebit.llm.caching.packed_cache import LayerCodes, need_packable
from sparsebit.llm.caching.row_codes import RowCodes
from sparsebit.llm.checkpoint.packed_folder import write_config
from sparsebit.llm.models.model_folder import ModelFolder, add_tensors
from sparsebit.llm.models.skeleton import Skeleton
from sparsebit.llm.recipe import Recipe
from sparsebit.llm.running.streaming import load_streamed

_FILE = "kv_cache.safetensors"


def need_cache(skeleton: Skeleton, recipe: Recipe) -> None:
    """Raise for a model whose cache cannot be kept in the recipe's format, before the work."""
    if recipe.kv_cache == "float":
        return
    codes = LayerCodes(RowCodes(recipe.kv_cache), RowCodes(recipe.kv_cache))
    config = skeleton.model.config.get_text_config(decoder=True)
    need_packable(skeleton.model, dict.fromkeys(range(int(config.num_hidden_layers)), codes))
    if recipe.calibrates_cache:
        attention_paths(skeleton.model)


def write_cache(
    folder: Path, recipe: Recipe, tokens: Tensor, batch_size: int, *, device: torch.device, trust_remote_code: bool
) -> None:
    """Add the recipe's cache to a folder of packed weights: the entry in `config.json`, and calibrated scales.

    Keys and values are those of the packed model on the calibration `tokens`, and the largest one of each head gets the
    largest code. Blocks are read one after another.
    """
    files = ModelFolder(folder)
    if recipe.kv_cache == "float":
        return
    if recipe.calibrates_cache:
        model = load_streamed(folder, dtype=torch.float32, device=device, trust_remote_code=trust_remote_code)
        ranges, paths = cache_ranges(model, tokens, batch_size), attention_paths(model)
        names = Skeleton(files, trust_remote_code=trust_remote_code).names
        tensors: dict[str, Tensor] = {}
        for number, largest in ranges.items():
            module = _file_name(names, paths[number])
            for which, values in zip("kv", largest, strict=True):
                found = values.reshape(-1, 1, 1) if recipe.kv_scales == "head" else values.max().reshape(1)
                tensors[f"{module}.{which}_scale"] = found / LARGEST[recipe.kv_cache]
        add_tensors(folder, _FILE, tensors)
    write_config(folder, with_cache(files.config, recipe.kv_cache, per_head=recipe.kv_scales == "head"))


def _file_name(names: dict[str, str], module: str) -> str:
    """The name in the files of a module of the model."""
    for name, file in names.items():
        inside = name.removeprefix(f"{module}.")
        if inside != name and file.endswith(f".{inside}"):
            return file.removesuffix(f".{inside}")
    raise CheckpointError(f"no tensor of {module} has its name in the files, so the scales of its cache have none")
