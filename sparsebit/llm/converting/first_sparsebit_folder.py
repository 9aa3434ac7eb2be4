"""Makes a model folder of a checkpoint of the first Sparsebit (pack32, pack8), with the same codes."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from sparsebit.errors import CheckpointError, ConfigError
from sparsebit.folders import write_text
from sparsebit.llm.checkpoint.compressed_tensors import layer_tensors, make_config
from sparsebit.llm.checkpoint.first_sparsebit import read_checkpoint, read_layer
from sparsebit.llm.checkpoint.layer_format import LayerFormat
from sparsebit.llm.checkpoint.packed_folder import copy_small_files
from sparsebit.llm.models.architectures import architecture_of, blocks_of
from sparsebit.llm.models.hub_classes import load_config
from sparsebit.llm.models.shards import Shards
from sparsebit.llm.models.skeleton import empty_model


@torch.no_grad()
def write_first_sparsebit(checkpoint: Path, base: Path | None, target: Path) -> None:
    """Write a compressed-tensors folder of the checkpoint. `base`: a folder with config.json and the tokenizer."""
    if base is None or not (base / "config.json").is_file():
        raise ConfigError(
            f"{checkpoint} is a file: a checkpoint of the first Sparsebit needs base (--base), a folder with the "
            f"config.json and the tokenizer of its model; given: {base}"
        )
    config = load_config(base)
    if config.model_type != "llama":
        raise ConfigError(f"base {base} is of type {config.model_type!r}: the first Sparsebit packed LLaMA models")
    model = empty_model(config, dtype=torch.float16)
    tensors = read_checkpoint(checkpoint)
    modules = {name: part for name, part in model.named_modules() if type(part) is nn.Linear}
    packed = [name for name in modules if f"{name}.qweight" in tensors]
    target.mkdir(parents=True)
    copy_small_files(base, target)
    blocks = blocks_of(model, architecture_of(model))
    path = architecture_of(model).blocks
    shards, formats = Shards(target, len(blocks) + 1), {}
    for number in range(-1, len(blocks)):  # -1: what is in no block
        made: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            layer, _, suffix = name.rpartition(".")
            block = int(name.removeprefix(f"{path}.").split(".")[0]) if name.startswith(f"{path}.") else -1
            if block != number:
                continue
            if layer in packed and suffix == "weight":
                weight = read_layer(tensors, layer, parameter.shape[1], checkpoint)
                if weight.out_features != parameter.shape[0]:
                    raise CheckpointError(
                        f"{checkpoint}: layer {layer} has {weight.out_features} rows; {base} has {parameter.shape[0]}"
                    )
                _refuse_bias(tensors, layer, modules[layer], checkpoint)
                made |= layer_tensors(layer, weight)
                size = 0 if weight.group_size == weight.in_features else weight.group_size
                formats[layer] = LayerFormat(weight.bits, size, symmetric=False)
            elif name in tensors and tensors[name].shape == parameter.shape:
                made[name] = tensors[name].clone()
            else:
                raise CheckpointError(
                    f"{checkpoint} has no tensor {name} of the shape {tuple(parameter.shape)}, which {base} has"
                )
        shards.write(made)
    shards.finish()
    floats = [name for name in modules if name not in formats]
    settings = json.loads((base / "config.json").read_text(encoding="utf-8"))
    settings["quantization_config"] = make_config(formats, floats)
    write_text(target / "config.json", json.dumps(settings, indent=2) + "\n")


def _refuse_bias(tensors: dict[str, Tensor], layer: str, module: nn.Linear, checkpoint: Path) -> None:
    bias = tensors.get(f"{layer}.bias")
    if bias is not None and module.bias is None and bool((bias != 0).any()):
        raise CheckpointError(f"{checkpoint}: layer {layer} has a bias, which this architecture does not have")
