"""`load`: a packed model from its folder; the weights stay packed in memory.

On a CPU, embeddings and the output layer may keep the half precision of their files in a float32 model. They are the
largest part of a small packed model, and a decoded token reads the whole output layer. Products of few rows are
computed in half precision, which reads half of the bytes; for more rows, where CPUs are slow in it, blocks of the
weight are converted to float32 one after another.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.errors import CheckpointError, ConfigError
from sparsebit.kernels.token_attention import compiles_on
from sparsebit.llm.caching.cache_scheme import cache_codes, scale_names
from sparsebit.llm.caching.packed_cache import LayerCodes, need_packable, use_packed_cache
from sparsebit.llm.checkpoint.packed_source import PackedSource, packed_source
from sparsebit.llm.layers.cpu_probe import UNPACKED, probe_cpu
from sparsebit.llm.layers.float_weight import FloatLinear, FloatWeight
from sparsebit.llm.layers.kernel_layouts import Activations, as_activations
from sparsebit.llm.layers.quant_linear import QuantLinear, join_parallel_layers, kernel_paths
from sparsebit.llm.layers.token_attention import use_token_attention
from sparsebit.llm.models.hub_classes import default_dtype, load_config
from sparsebit.llm.models.model_folder import ModelFolder
from sparsebit.llm.models.skeleton import Skeleton
from sparsebit.llm.process_group import as_device

log = logging.getLogger(__name__)


@torch.no_grad()
def load(
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    activations: str = "float32",
    join_layers: bool | None = None,
    kv_cache: str = "folder",
    trust_remote_code: bool = False,
) -> Any:
    """The causal language model of `folder`, ready to run, with its quantized layers packed.

    `folder`: as `quantize` or `convert` writes it, any `pack-quantized` folder of compressed-tensors, or GPTQ files
    with static groups (layers become `QuantLinear`), or its fp8, mxfp4 and nvfp4 weights (`FloatLinear`); a float model
    is loaded unchanged. `dtype`: of activations and float weights; by default float32 on a CPU, where half precision is
    slow, and the type of the files elsewhere. The model is one of transformers: `generate` works, and `peft` finds the
    layers.

    Each layer's product is computed by the fastest kernel of the device that supports the layer; the log and
    `kernel_paths(model)` name it. `activations`: on a CPU, how far kernels may round the inputs of packed layers:
    "float32" not at all; "bfloat16" or "int8" allow kernels that round, and a probe chooses the fastest of them;
    embeddings and the output layer then stay in the half precision of the files. `join_layers`: q, k and v, and gate
    and up, share a product if their formats are equal and the kernel can join them; by default on CUDA devices, where a
    token of a Llama-8B-shaped model took 8 % less time. There a known architecture also gets our attention for steps of
    one token with a mask (`token_attention`); `model.set_attn_implementation("sdpa")` undoes that.

    `kv_cache`: how keys and values are kept: "folder", as the config of the folder says; "float"; "int8" and "fp8",
    with the calibrated scales of the folder; "int4". Every forward outside of training then computes with the packed
    keys and values, also without a cache of the caller.

    Files that differ from the `checksums.json` of their folder, which `quantize` and `convert` write, are an error.
    """
    rounding = as_activations(activations)
    skeleton = checked_skeleton(folder, dtype, device, trust_remote_code=trust_remote_code)
    files, device, dtype = skeleton.folder, skeleton.device, skeleton.dtype
    source = packed_source(skeleton)
    codes = cache_codes(skeleton, kv_cache)
    packed = [key for name in source.formats for key in source.keys(name)]
    skeleton.check_unused([*packed, *scale_names(files).values()])
    for name in source.formats:
        layer = read_layer(source, name, skeleton.model.get_submodule(name)).to(device)
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
    pack_cache(skeleton.model, codes)
    if source.formats:
        skeleton.model.save_pretrained = _refuse_to_save
    _log_kernels(skeleton.model, rounding)
    if num_joined:
        log.info("%d groups of layers that read one input share a product", num_joined)
    return skeleton.model


def pack_cache(model: Any, codes: Mapping[int, LayerCodes]) -> None:
    """Let the model use a packed cache, if there are codes for it."""
    if codes:
        need_packable(model, codes)
        use_packed_cache(model, codes)
        log.info("keys and values of %d layers are kept as %s", len(codes), next(iter(codes.values())).keys.kind)


def checked_skeleton(
    folder: str | os.PathLike[str], dtype: torch.dtype | None, device: torch.device | str, *, trust_remote_code: bool
) -> Skeleton:
    """The model without its weights, after its files were compared with their checksums."""
    device, files = as_device(device), ModelFolder(folder)
    files.check_files()
    config = load_config(files.path, trust_remote_code=trust_remote_code)
    dtype = dtype or default_dtype(config, device)
    return Skeleton(files, dtype=dtype, device=device, trust_remote_code=trust_remote_code)


def read_layer(source: PackedSource, name: str, plain: Any) -> QuantLinear | FloatLinear:
    """The packed layer `name` of the files. `plain`: the architecture's layer; sizes and bias must fit."""
    weight = source.read(name)
    found, wanted = (weight.out_features, weight.in_features), (plain.out_features, plain.in_features)
    if found != wanted:
        shapes = f"the packed weight of {name} has the shape {found}, and the architecture wants {wanted}"
        raise CheckpointError(f"{source.skeleton.folder.path}: {shapes}")
    bias = None if plain.bias is None else source.skeleton.read(f"{name}.bias", plain.bias)
    rounding = source.input_rounding(name)
    kind = FloatLinear if isinstance(weight, FloatWeight) else QuantLinear
    return kind(weight, bias, inputs=rounding)  # type: ignore[arg-type]


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
        more = " (chosen)" if name == probe.name else ""
        more += f" (not taken: {probe.refused[name]})" if name in probe.refused else ""
        off = probe.difference[name]
        log.info("%s: 1 row x 1024 x 1024 in %.0f us, %.2g off%s", name, 1e6 * seconds, off, more)
    if probe.name == UNPACKED:
        log.info("activations=%r: no kernel that rounds them is faster here; they stay float32", activations)


HALVES = (torch.float16, torch.bfloat16)
_FEW_ROWS = 4
_BLOCK = 1 << 22  # elements of the weight that are float32 at a time: 16 MiB


class HalfEmbedding(nn.Embedding):
    """An embedding with a weight of half precision; its output is float32, or the type the model is converted to."""

    like: Tensor  # empty: only its type matters, which is that of the outputs

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, device="meta")
        self.register_buffer("like", torch.empty(0), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).to(self.like.dtype)


class HalfLinear(nn.Linear):
    """A linear layer with a weight of half precision, for float32 inputs."""

    def forward(self, input: Tensor) -> Tensor:
        weight, x = self.weight, input.reshape(-1, self.in_features)
        if len(x) <= _FEW_ROWS:
            y = F.linear(x.to(weight.dtype), weight).to(input.dtype)
        else:
            blocks = weight.split(max(_BLOCK // self.in_features, 1))
            y = torch.cat([F.linear(x, block.to(input.dtype)) for block in blocks], -1)
        y = y.reshape(*input.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def keep_halves(skeleton: Skeleton) -> None:
    """Let plain embeddings and the plain output layer of a filled model keep the files' type, unless tied to others."""
    model = skeleton.model
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    paths = {path: module for path, module in model.named_modules() if any(module is end for end in ends)}
    names = {id(tensor): name for name, tensor in model.named_parameters() if name in skeleton.names}
    others = {id(module.weight) for module in paths.values() if type(module) not in (nn.Embedding, nn.Linear)}
    wanted = {id(module.weight) for module in paths.values()} - others
    stored = {key: skeleton.stored_type(name) for key, name in names.items() if key in wanted}
    for path, module in paths.items():
        if stored.get(id(module.weight)) in HALVES:
            model.set_submodule(path, _half(module, stored[id(module.weight)]))
    model.tie_weights()


def _half(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    weight = nn.Parameter(module.get_parameter("weight").detach().to(dtype), requires_grad=False)
    if isinstance(module, nn.Embedding):
        found = HalfEmbedding(len(weight), weight.shape[1], module.padding_idx)
        found.weight = weight
        return found.train(module.training)
    assert isinstance(module, nn.Linear)
    linear = HalfLinear(module.in_features, module.out_features, bias=module.bias is not None, device="meta")
    linear.weight, linear.bias = weight, module.bias
    return linear.train(module.training)
