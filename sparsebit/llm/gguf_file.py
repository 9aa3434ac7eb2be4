"""Writes a model as one GGUF file, for llama.cpp and what is built on it. Architectures are rows of a table."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparsebit.errors import DeploymentError, MissingExtraError
from sparsebit.llm.gguf_mixes import Mix
from sparsebit.llm.gguf_tensors import GgufTensor, gguf_tensors
from sparsebit.llm.gguf_tokenizer import add_tokenizer
from sparsebit.llm.packed_source import PackedSource
from sparsebit.progress import track

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Row:
    """`name`: of the architecture in the file. `rotates_pairs`: rows of q and k are reordered."""

    name: str
    rotates_pairs: bool


# By `model_type` of config.json.
ARCHITECTURES = {
    "llama": _Row("llama", rotates_pairs=True),
    "mistral": _Row("llama", rotates_pairs=True),
    "qwen2": _Row("qwen2", rotates_pairs=False),
}


def gguf_package() -> Any:
    """The package gguf."""
    try:
        import gguf
    except ImportError:
        raise MissingExtraError("gguf", "gguf", "GGUF files") from None
    return gguf


@torch.no_grad()
def write_gguf(path: Path, source: PackedSource, mix: Mix | None = None) -> list[GgufTensor]:
    """Write the model to `path`, one tensor in memory at a time, and give what was written.

    `mix`: the types that matrices are rounded to. None: packed layers keep their codes, in types that hold them.
    """
    gguf = gguf_package()
    folder = source.skeleton.folder
    config = source.skeleton.model.config
    row = ARCHITECTURES.get(config.model_type)
    if row is None:
        raise DeploymentError(f"GGUF files of model type {config.model_type!r}: allowed: {', '.join(ARCHITECTURES)}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[row.name.upper()], config.num_hidden_layers)
    tensors = gguf_tensors(source, names.get_name, row.name, row.rotates_pairs, mix)
    writer = gguf.GGUFWriter(path, row.name)
    _add_sizes(writer, config, source)
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
        except OSError as error:  # numpy tells of a full disk by numbers of elements
            with contextlib.suppress(OSError):
                writer.close()
            raise OSError(f"{path} cannot be written ({error}); is the disk full?") from error
    writer.close()
    told = ", ".join(f"{name}=True" for name in unnamed_biases(config))
    if told:
        log.warning(
            "%s has biases: llama.cpp reads them, transformers only where from_pretrained is given %s", path.name, told
        )
    return tensors


def unnamed_biases(config: Any) -> dict[str, bool]:
    """The settings of a Llama with biases: GGUF has no key for them, and transformers leaves the biases out."""
    return {name: True for name in ("attention_bias", "mlp_bias") if getattr(config, name, False)}


def _add_sizes(writer: Any, config: Any, source: PackedSource) -> None:
    """`config`: as transformers has read it, in which older ways to say the same have become one."""
    rope = config.rope_parameters or {}
    kind = rope.get("rope_type", "default")
    if kind != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise DeploymentError(f"rotary embeddings {dict(rope)} are not written to GGUF files yet; only type 'default'")
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window is not None and window < config.max_position_embeddings:
        raise DeploymentError(
            f"attention to the last {window} tokens alone (sliding_window) is not written to GGUF files"
        )
    heads = int(config.num_attention_heads)
    size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    writer.add_name(source.skeleton.folder.path.name)
    writer.add_vocab_size(int(config.vocab_size))
    writer.add_context_length(int(config.max_position_embeddings))
    writer.add_embedding_length(int(config.hidden_size))
    writer.add_block_count(int(config.num_hidden_layers))
    writer.add_feed_forward_length(int(config.intermediate_size))
    writer.add_head_count(heads)
    writer.add_head_count_kv(int(config.num_key_value_heads or heads))
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(float(rope.get("rope_theta") or 10000.0))
    writer.add_layer_norm_rms_eps(float(config.rms_norm_eps))
