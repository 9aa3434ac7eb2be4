"""Writes a model as one GGUF file, for llama.cpp and the software built on it.

The header (settings, tokenizer, names and sizes of all tensors) is written first, then one tensor at a time. The
computation of llama.cpp for an architecture is a row of `architectures.py`; a model that differs from its row is an
error, since llama.cpp would compute something else from the file without a warning.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from sparsebit.errors import DeploymentError
from sparsebit.llm.checkpoint.layer_format import LayerFormat
from sparsebit.llm.checkpoint.packed_source import PackedSource
from sparsebit.llm.gguf.architectures import (
    GgufArchitecture,
    add_rotary,
    frequency_factors,
    gguf_architecture,
    head_width,
    text_length,
    unnamed_settings,
)
from sparsebit.llm.gguf.blocks import BYTES
from sparsebit.llm.gguf.k_quant_math import SUPER_BLOCK
from sparsebit.llm.gguf.tensors import SMALL_BLOCKS, GgufTensor, Mix, constant_tensor, gguf_tensors
from sparsebit.llm.gguf.tokenizer import add_tokenizer
from sparsebit.llm.models.hub_classes import package
from sparsebit.progress import track

log = logging.getLogger(__name__)


def gguf_package() -> Any:
    """The package gguf."""
    return package("gguf", "gguf", "GGUF files")


@torch.no_grad()
def need_writable(folder: Path, config: Any) -> None:
    """Raise for a model whose architecture, rotary embeddings or tokenizer a GGUF file does not hold."""
    writer = _NoWriter()
    _add_settings(writer, config, gguf_architecture(config))
    add_tokenizer(writer, folder, config)


class _NoWriter:
    """A writer of GGUF files that keeps nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *values, **named: None


def _add_settings(writer: Any, config: Any, row: GgufArchitecture) -> None:
    """`config`: as read by transformers, which converts older settings to their present form."""
    heads, size = int(config.num_attention_heads), head_width(config)
    writer.add_vocab_size(int(config.vocab_size))
    writer.add_context_length(text_length(config))
    writer.add_embedding_length(int(config.hidden_size))
    writer.add_block_count(int(config.num_hidden_layers))
    writer.add_feed_forward_length(int(config.intermediate_size))
    writer.add_head_count(heads)
    writer.add_head_count_kv(int(config.num_key_value_heads or heads))
    writer.add_key_length(size)
    writer.add_value_length(size)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(float(config.rms_norm_eps))
    else:
        writer.add_layer_norm_eps(float(config.layer_norm_eps))
    if getattr(config, "num_experts", None) is not None:
        writer.add_expert_count(int(config.num_experts))
        writer.add_expert_used_count(int(config.num_experts_per_tok))
        if hasattr(config, "moe_intermediate_size"):
            writer.add_expert_feed_forward_length(int(config.moe_intermediate_size))
    _add_window(writer, config, row)
    add_rotary(writer, config, size, row.rotary, is_partial=row.is_partly_rotated)


def write_gguf(path: Path, source: PackedSource, mix: Mix | None = None) -> list[GgufTensor]:
    """Write the model, one tensor in memory at a time; without `mix`, packed layers keep their codes."""
    gguf = gguf_package()
    folder = source.skeleton.folder
    config = source.skeleton.model.config
    row = gguf_architecture(config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[row.name.upper()], config.num_hidden_layers)
    tensors = gguf_tensors(source, names.get_name, row.name, row.rotates_pairs, mix, row.norm_offset)
    writer = gguf.GGUFWriter(path, row.name)
    _add_settings(writer, config, row)
    tensors += [constant_tensor(name, factors) for name, factors in frequency_factors(config).items()]
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    if mix is not None:
        writer.add_file_type(gguf.LlamaFileType[mix.file_type])
    add_tokenizer(writer, folder.path, config)
    for item in tensors:
        kind = gguf.GGMLQuantizationType[item.kind]
        writer.add_tensor_info(item.name, item.shape, item.numpy_type, item.nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for item in track(tensors, "writing tensors"):
        data = item.read().numpy()
        try:
            writer.write_tensor_data(data)
        except OSError as error:  # numpy's error for a full disk names numbers of elements only
            with contextlib.suppress(OSError):
                writer.close()
            raise OSError(f"{path} cannot be written ({error}); is the disk full?") from error
    writer.close()
    _log_limits(path.name, config, row)
    return tensors


def _log_limits(name: str, config: Any, row: GgufArchitecture) -> None:
    """Log the limits of the file."""
    length, unnamed = text_length(config), unnamed_settings(config)
    if length < config.max_position_embeddings:
        log.warning(
            "%s: llama.cpp has no window of attention (sliding_window: %d) in models of %s: the file is for texts of "
            "up to %d tokens, which are within it",
            *(name, config.sliding_window, row.name, length),
        )
    if not row.has_reader:
        log.warning("%s: llama.cpp reads %s, transformers does not", name, config.model_type)
    elif unnamed:
        log.warning(
            "%s: llama.cpp reads %s, transformers only where from_pretrained is given %s",
            name, " and ".join(unnamed), ", ".join(f"{name}={value}" for name, value in unnamed.items()),
        )  # fmt: skip


def _add_window(writer: Any, config: Any, row: GgufArchitecture) -> None:
    """In llama.cpp, the architecture, not the file, defines which layers only attend to the last tokens."""
    every = row.whole_every
    if every == 1:
        return
    given = list(config.layer_types)
    if given != ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(len(given))]:
        raise DeploymentError(
            f"layer_types {given}: in GGUF files of {row.name} each {every}th layer attends to the whole text, and the "
            "others to a window"
        )
    writer.add_sliding_window(int(config.sliding_window))


_CODE_BITS = {"Q4_0": 4, "Q5_0": 5, "Q8_0": 8, "Q4_K": 4, "Q6_K": 6}


def warn_of_growth(tensors: Iterable[GgufTensor], formats: Mapping[str, LayerFormat]) -> None:
    """`formats`: of the packed layers that the file was made from. Types that were requested by name do not count."""
    exact: Counter[tuple[LayerFormat, str]] = Counter()
    replaced: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.is_rounded:
            replaced[tensor.kind] += tensor.kind in SMALL_BLOCKS.values()
            continue
        for parameter in tensor.parameters:
            layer = formats.get(parameter.removesuffix(".weight"))
            if layer is not None and _CODE_BITS[tensor.kind] > layer.bits:
                exact[layer, tensor.kind] += 1
    for (layer, kind), count in exact.items():
        zero_points = "" if layer.symmetric else " with zero points"
        log.warning(
            "%d layers of %d bits%s are stored as %s, %.1f bits a weight: no smaller GGUF type holds them without "
            "rounding; quantize with --for llama.cpp (4 bits become Q4_0, %.1f bits a weight), or round to a smaller "
            "type (--gguf-type Q4_K)",
            *(count, layer.bits, zero_points, kind, _bits_of(kind), _bits_of("Q4_0")),
        )
    for wanted, kind in SMALL_BLOCKS.items():
        if replaced[kind]:
            log.warning(
                "%d tensors are stored as %s, %.1f bits a weight, instead of %s, %.1f bits: their rows are not a "
                "multiple of %d columns",
                *(replaced[kind], kind, _bits_of(kind), wanted, _bits_of(wanted), SUPER_BLOCK),
            )


def _bits_of(kind: str) -> float:
    weights, size = BYTES[kind]
    return 8 * size / weights
