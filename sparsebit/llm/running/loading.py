"""`load`: a packed model from its folder; the weights stay packed in memory."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparsebit.errors import CheckpointError, ConfigError
from sparsebit.kernels.token_attention import compiles_on
from sparsebit.llm.checkpoint.packed_source import PackedSource, packed_source
from sparsebit.llm.devices import as_device
from sparsebit.llm.layers.cpu_probe import UNPACKED, probe_cpu
from sparsebit.llm.layers.float_linear import FloatLinear
from sparsebit.llm.layers.float_weight import FloatWeight
from sparsebit.llm.layers.kernel_layouts import Activations, as_activations
from sparsebit.llm.layers.parallel_layers import join_parallel_layers
from sparsebit.llm.layers.quant_linear import QuantLinear, kernel_paths
from sparsebit.llm.layers.token_attention import use_token_attention
from sparsebit.llm.models.hub_classes import default_dtype, load_config
from sparsebit.llm.models.model_folder import ModelFolder
from sparsebit.llm.models.skeleton import Skeleton
from sparsebit.llm.running.half_weights import keep_halves

log = logging.getLogger(__name__)


@torch.no_grad()
def load(
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    activations: str = "float32",
    join_layers: bool | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """The causal language model of `folder`, ready to run, with its quantized layers packed.

    `folder`: as `quantize` or `convert` writes it, any `pack-quantized` folder of compressed-tensors, or GPTQ files
    with static groups (layers become `QuantLinear`), or its fp8, mxfp4 and nvfp4 weights (`FloatLinear`); a float model
    is loaded unchanged. `dtype`: of activations and float weights; by default float32
    on a CPU, where half precision is slow, and the type of the files elsewhere. The model is one of transformers:
    `generate` works, and `peft` finds the layers.

    Each layer's product is computed by the fastest kernel of the device that supports the layer; the log and
    `kernel_paths(model)` name it. `activations`: on a CPU, how far kernels may round the inputs of packed layers:
    "float32" not at all; "bfloat16" or "int8" allow kernels that round, and a probe chooses the fastest of them;
    embeddings and the output layer then stay in the half precision of the files.
    `join_layers`: q, k and v, and gate and up, share a product if their formats are equal and the kernel can join
    them; by default on CUDA devices, where a token of a Llama-8B-shaped model took 8 % less time.
    There a known architecture also gets our attention for steps of one token with a mask (`token_attention`), where
    transformers would use torch's; `model.set_attn_implementation("sdpa")` undoes that.

    Files that differ from the `checksums.json` of their folder, which `quantize` and `convert` write, are an error.
    """
    rounding = as_activations(activations)
    skeleton = checked_skeleton(folder, dtype, device, trust_remote_code=trust_remote_code)
    files, device, dtype = skeleton.folder, skeleton.device, skeleton.dtype
    packed = _packed_layers(skeleton)
    for name, layer in packed.items():
        layer = layer.to(device)
        if isinstance(layer, QuantLinear):
            layer.prepare(dtype, rounding)
        skeleton.model.set_submodule(name, layer)
    skeleton.fill("")
    skeleton.model.tie_weights()
    if rounding != "float32" and dtype == torch.float32 and device.type == "cpu":
        keep_halves(skeleton)
    files.close()
    load_generation_config(skeleton.model, files.path)
    joins = device.type == "cuda" if join_layers is None else join_layers
    num_joined = join_parallel_layers(skeleton.model) if joins else 0
    if compiles_on(device):
        use_token_attention(skeleton.model)
    if packed:
        skeleton.model.save_pretrained = _refuse_to_save
    _log_kernels(skeleton.model, rounding)
    if num_joined:
        log.info("%d groups of layers that read one input share a product", num_joined)
    return skeleton.model


def checked_skeleton(
    folder: str | os.PathLike[str],
    dtype: torch.dtype | None,
    device: torch.device | str,
    *,
    trust_remote_code: bool,
) -> Skeleton:
    """The model without its weights, after its files were compared with their checksums."""
    device, files = as_device(device), ModelFolder(folder)
    files.check_files()
    config = load_config(files.path, trust_remote_code=trust_remote_code)
    dtype = dtype or default_dtype(config, device)
    return Skeleton(files, dtype=dtype, device=device, trust_remote_code=trust_remote_code)


def _packed_layers(skeleton: Skeleton) -> dict[str, QuantLinear | FloatLinear]:
    """The quantized layers, by the names of their modules."""
    source = packed_source(skeleton)
    skeleton.check_unused(() if source is None else [key for name in source.formats for key in source.keys(name)])
    if source is None:
        return {}
    layers: dict[str, QuantLinear | FloatLinear] = {}
    for name in source.formats:
        layers[name] = read_layer(source, name, skeleton.model.get_submodule(name))
    return layers


def read_layer(source: PackedSource, name: str, plain: Any) -> QuantLinear | FloatLinear:
    """The packed layer `name` of the files. `plain`: the architecture's layer; sizes and bias must fit."""
    weight = source.read(name)
    found, wanted = (weight.out_features, weight.in_features), (plain.out_features, plain.in_features)
    if found != wanted:
        raise CheckpointError(
            f"{source.skeleton.folder.path}: the packed weight of {name} has the shape {found}, and the architecture "
            f"wants {wanted}"
        )
    bias = None if plain.bias is None else source.skeleton.read(f"{name}.bias", plain.bias)
    return FloatLinear(weight, bias) if isinstance(weight, FloatWeight) else QuantLinear(weight, bias)


def load_generation_config(model: Any, folder: Path) -> None:
    """Read the settings of `generate` from the model's folder."""
    if (folder / "generation_config.json").is_file():
        model.generation_config = type(model.generation_config).from_pretrained(folder, local_files_only=True)


def _refuse_to_save(*_: Any, **__: Any) -> None:
    """Replaces transformers' `save_pretrained`, which would write files that nothing can read."""
    raise ConfigError(
        "save_pretrained of a model with packed layers: nothing reads what it writes; copy the folder it came "
        "from, or change its format with sparsebit.llm.convert. The PeftModel around it saves adapters"
    )


def _log_kernels(model: nn.Module, activations: Activations) -> None:
    for path, count in kernel_paths(model).items():
        log.info("%d packed layers: %s", count, path)
    if activations == "float32" or next(model.parameters()).device.type != "cpu":
        return
    probe = probe_cpu(activations)
    for name, seconds in probe.seconds.items():
        log.info(
            "%s: 1 row x 1024 x 1024 in %.0f us, %.2g off the dequantized weight%s%s",
            name,
            1e6 * seconds,
            probe.difference[name],
            " (chosen)" if name == probe.name else "",
            f" (not taken: {probe.refused[name]})" if name in probe.refused else "",
        )
    if probe.name == UNPACKED:
        log.info("activations=%r: no kernel that rounds them is faster here; they stay float32", activations)
