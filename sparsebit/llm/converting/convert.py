"""`convert`: writes a packed model folder in another file format, and checks it before it is kept.

Codes and scales do not change: a folder format is a row of `FORMATS`, which turns a packed weight into the tensors
of a file, and `PackedSource.rewrite` writes the folder. GGUF and GenAI have separate writers. Everything is written to
a staging folder, compared with the source by `load_check.py`, and only then renamed.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import CheckpointError, ConfigError, DeploymentError
from sparsebit.folders import flush, need_new, put_in_place, staging_folder
from sparsebit.llm.caching.cache_scheme import scale_names
from sparsebit.llm.checkpoint import awq, compressed_tensors, gptq
from sparsebit.llm.checkpoint.compressed_tensors import layer_tensors, make_config
from sparsebit.llm.checkpoint.first_sparsebit import read_checkpoint, read_layer
from sparsebit.llm.checkpoint.layer_format import LayerFormat
from sparsebit.llm.checkpoint.packed_folder import copy_small_files, write_config
from sparsebit.llm.checkpoint.packed_source import PackedSource, float_layers, packed_source
from sparsebit.llm.converting.genai_folder import builder_tensors, genai_package, run_builder, warn_of_tokens, why_not
from sparsebit.llm.converting.load_check import LoadCheck, check_conversion, check_genai, check_gguf, need_reader
from sparsebit.llm.converting.targets import AWQ, COMPRESSED_TENSORS, GPTQ, vllm_reasons
from sparsebit.llm.gguf.file import gguf_package, warn_of_growth, write_gguf
from sparsebit.llm.gguf.tensors import EXACT, MIXES, Mix, mix_of
from sparsebit.llm.layers.float_weight import Weight, integers
from sparsebit.llm.models.architectures import architecture_of, blocks_of
from sparsebit.llm.models.hub_classes import load_config, load_tokenizer
from sparsebit.llm.models.model_folder import ModelFolder, Shards
from sparsebit.llm.models.separate_experts import experts_in
from sparsebit.llm.models.skeleton import Skeleton, empty_model

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Format:
    """`config(formats, float_layers)`: the `quantization_config`. `tensors(name, packed)`: of a layer."""

    config: Callable[[Mapping[str, LayerFormat], Sequence[str]], dict[str, Any]]
    tensors: Callable[[str, Weight], dict[str, Tensor]]


def _gptq(version: gptq.Version) -> _Format:
    return _Format(
        lambda formats, _: gptq.make_config(formats, version),
        lambda name, packed: gptq.layer_tensors(name, integers(packed), version),
    )


FORMATS: dict[str, _Format] = {
    COMPRESSED_TENSORS: _Format(compressed_tensors.make_config, compressed_tensors.layer_tensors),
    "gptq": _gptq(2),
    "gptq-v1": _gptq(1),
    AWQ: _Format(awq.make_config, lambda name, packed: awq.layer_tensors(name, integers(packed))),
}
GGUF, GENAI = "gguf", "onnx-genai"
_FOR_BUILDER = replace(_gptq(1), tensors=lambda name, packed: builder_tensors(name, integers(packed)))


@dataclass(frozen=True)
class ConvertedModel:
    """The result of `convert`: a folder, or a GGUF file. `check`: None, if it was switched off.

    `formats`: of the packed layers that it was made from. `gguf_types`: of the tensors in a GGUF file, by their names.
    """

    output: Path
    format: str
    formats: Mapping[str, LayerFormat]
    check: LoadCheck | None
    gguf_types: Mapping[str, str] = field(default_factory=dict)


def convert(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    format: str,  # noqa: A002 - the word that users know
    *,
    gguf_type: str = EXACT,
    base: str | os.PathLike[str] | None = None,
    check: bool = True,
    trust_remote_code: bool = False,
) -> ConvertedModel:
    """Write the packed model of one folder to another folder, with the same codes, in another file format.

    `format`: "compressed-tensors", "gptq" (version 2), "gptq-v1", "awq", "onnx-genai" (for ONNX Runtime GenAI) or
    "gguf"; the last is one file, and `output` ends in .gguf. `output` appears whole, after its logits were compared
    with those of `model` (`check`): by our reader, and by transformers if the package for the format is installed; for
    a GGUF file by transformers only (or, if it cannot read the file, by us with the weights that the package gguf
    reads); for ONNX by onnxruntime-genai.

    `gguf_type`: "exact" keeps the codes of a packed model. "Q4_K", "Q6_K" and the mix "Q4_K_M" round the weights of a
    packed or a float model to these types; `check` measures the resulting change of the logits.

    `model` may also be a checkpoint file of the first Sparsebit (pack32 or pack8); then `base` is a folder with the
    config.json and the tokenizer of its model.
    """
    target, mix = Path(output), mix_of(gguf_type)
    is_file, is_folder = target.suffix == ".gguf", not Path(model).is_file()
    if format not in (*FORMATS, GGUF, GENAI):
        raise ConfigError(f"format={format!r}: allowed: {', '.join(FORMATS)}, {GGUF}, {GENAI}")
    refusals = {
        f"gguf_type={gguf_type!r} with format={format!r}: it is for format 'gguf'": mix is not None and format != GGUF,
        f"output {target}: {format} is one file: give an output that ends in .gguf": format == GGUF and not is_file,
        f"output {target}: {format} is a folder, not a .gguf file": format != GGUF and is_file,
        f"base={base} with {model}: it is for checkpoint files of the first Sparsebit": is_folder and base is not None,
    }
    for text, is_wrong in refusals.items():
        if is_wrong:
            raise ConfigError(text)
    need_new(target)
    if check and format == COMPRESSED_TENSORS:
        need_reader()
    if format == GGUF:
        gguf_package()
    if format == GENAI:
        genai_package()
    with staging_folder(target, alone=True) as staging:
        if is_folder:
            return _convert(Path(model), target, staging, format, gguf_type, check, trust_remote_code)
        folder = staging / "first-sparsebit" / target.stem
        write_first_sparsebit(Path(model), None if base is None else Path(base), folder)
        return _convert(folder, target, staging, format, gguf_type, check, False)


def _convert(
    model: Path,
    target: Path,
    staging: Path,
    format: str,  # noqa: A002
    gguf_type: str,
    check: bool,
    trust_remote_code: bool,
) -> ConvertedModel:
    """`convert` for a model folder; results are in `staging` until they are complete."""
    mix = mix_of(gguf_type)
    original = ModelFolder(model)
    original.check_files()
    skeleton = Skeleton(original, trust_remote_code=trust_remote_code)
    source = packed_source(skeleton)
    _check(source, skeleton, format, mix, check=check)
    made = staging / "made" / target.name
    made.parent.mkdir()
    found, types, folder = None, {}, skeleton.folder.path
    if format == GGUF:
        tensors = write_gguf(made, source, mix)
        flush(made)
        warn_of_growth(tensors, source.formats)
        types = {tensor.name: tensor.kind for tensor in tensors}
        if check:
            found = check_gguf(made, folder, tensors, trust_remote_code=trust_remote_code)
    elif format == GENAI:
        files = staging / "gptq" / target.name
        _write(files, source, _FOR_BUILDER)
        bits = max(layer.bits for layer in source.formats.values())
        run_builder(files, made, bits, trust_remote_code=trust_remote_code)
        shutil.rmtree(files)
        if check:
            found = check_genai(made, folder, trust_remote_code=trust_remote_code)
            warn_of_tokens(made, load_tokenizer(folder, trust_remote_code=trust_remote_code))
    else:
        _write(made, source, FORMATS[format])
        if check:
            method = format if format in (COMPRESSED_TENSORS, AWQ) else GPTQ
            reasons = vllm_reasons(source.formats, _fused(skeleton), method)
            found = check_conversion(made, folder, reasons, trust_remote_code=trust_remote_code)
    put_in_place(made, target)
    return ConvertedModel(target, format, source.formats, found, types)


def _check(source: PackedSource, skeleton: Skeleton, target: str, mix: Mix | None, *, check: bool) -> None:
    """Refuse a model that the format cannot hold, or a result that could not be checked."""
    path, formats = skeleton.folder.path, source.formats.values()
    source.need_float_inputs()
    if not source.formats and mix is None:
        raise ConfigError(
            f"{path} is a float model: quantize it first (sparsebit llm quantize), or write a GGUF file of type "
            f"{' or '.join(MIXES)}"
        )
    if check and target == COMPRESSED_TENSORS:
        need_reader({layer.bits for layer in formats})
    kinds = sorted({layer.kind for layer in formats} - {"int"})
    reason, unread = None, None
    if target == AWQ:
        awq.make_config(source.formats, ())  # raises for formats that it does not have
    if check and (target.startswith("gptq") or target == AWQ):
        unread = "layers of different number formats" if len(set(formats)) > 1 else None
        unread = "experts" if experts_in(skeleton.model) else unread
    if kinds and mix is None and target != COMPRESSED_TENSORS:
        reason = f"has {', '.join(kinds)} weights: {target} holds whole numbers only"
    elif unread is not None:
        reason = (
            f"has {unread}, which transformers does not read in {target} files, so that the result cannot be checked; "
            "keep compressed-tensors, or skip the check (--no-check)"
        )
    elif target == GENAI:
        columns = {name: skeleton.model.get_submodule(name).in_features for name in source.formats}
        reason = why_not(source.formats, columns)
    if reason is not None:
        raise DeploymentError(f"{path} {reason}")


def _write(target: Path, source: PackedSource, kind: _Format) -> None:
    folder, dropped = source.skeleton.folder, list[str]()
    config = kind.config(source.formats, float_layers(source.skeleton, source.formats))
    scheme = (folder.config.get("quantization_config") or {}).get("kv_cache_scheme")
    if scheme and "kv_cache_scheme" in config:
        config["kv_cache_scheme"] = scheme
    elif scheme:
        dropped = [*scale_names(folder).values()]
        log.warning(
            "%s: files of %s have no scales for a cache, which is float there", target.name, config["quant_method"]
        )
    tensors = lambda layer: kind.tensors(source.file_name(layer), source.read(layer))  # noqa: E731
    source.rewrite(target, folder.config | {"quantization_config": config}, tensors, dropped=dropped)


def _fused(skeleton: Skeleton) -> list[tuple[str, ...]]:
    """The layers that servers fuse; for an unknown architecture they are unknown without running it."""
    architecture = architecture_of(skeleton.model)
    found: list[tuple[str, ...]] = []
    for number, block in enumerate(blocks_of(skeleton.model, architecture)):
        path = f"{architecture.blocks}.{number}"
        groups = architecture.fused_groups(architecture.stages_in(block) or ())
        found += [tuple(f"{path}.{name}" for name in group) for group in groups]
    return found


# --- checkpoint files of the first Sparsebit


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
    tensors, path = read_checkpoint(checkpoint), architecture_of(model).blocks
    modules = {name: part for name, part in model.named_modules() if type(part) is nn.Linear}
    target.mkdir(parents=True)
    copy_small_files(base, target)
    by_block: dict[str, dict[str, Tensor]] = {}  # "": what is in no block
    for name, parameter in model.named_parameters():
        inner = name.removeprefix(f"{path}.")
        by_block.setdefault("" if inner == name else inner.split(".")[0], {})[name] = parameter
    shards, formats = Shards(target, len(by_block)), {}
    for number in sorted(by_block, key=lambda number: int(number or -1)):
        made: dict[str, Tensor] = {}
        for name, parameter in by_block[number].items():
            layer, _, suffix = name.rpartition(".")
            if layer in modules and suffix == "weight" and f"{layer}.qweight" in tensors:
                weight = read_layer(tensors, layer, parameter.shape[1], checkpoint)
                bias = tensors.get(f"{layer}.bias")
                problem = None
                if weight.out_features != parameter.shape[0]:
                    problem = f"{weight.out_features} rows; {base} has {parameter.shape[0]}"
                elif bias is not None and modules[layer].bias is None and bool((bias != 0).any()):
                    problem = "a bias, which this architecture does not have"
                if problem is not None:
                    raise CheckpointError(f"{checkpoint}: layer {layer} has {problem}")
                made |= layer_tensors(layer, weight)
                size = 0 if weight.group_size == weight.in_features else weight.group_size
                formats[layer] = LayerFormat(weight.bits, size, symmetric=False)
            elif name in tensors and tensors[name].shape == parameter.shape:
                made[name] = tensors[name].clone()
            else:
                shape = tuple(parameter.shape)
                raise CheckpointError(f"{checkpoint} has no tensor {name} of the shape {shape}, which {base} has")
        shards.write(made)
    shards.finish()
    settings = json.loads((base / "config.json").read_text(encoding="utf-8"))
    floats = [name for name in modules if name not in formats]
    write_config(target, settings | {"quantization_config": make_config(formats, floats)})
