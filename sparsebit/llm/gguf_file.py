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
from sparsebit.llm.gguf_rotary import add_rotary, frequency_factors, rotary_kind
from sparsebit.llm.gguf_tensors import GgufTensor, constant_tensor, gguf_tensors
from sparsebit.llm.gguf_tokenizer import add_tokenizer
from sparsebit.llm.packed_source import PackedSource
from sparsebit.progress import track

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Row:
    """`name`: of the architecture in the file. `rotates_pairs`: rows of q and k are reordered.

    `has_factors`: llama.cpp reads factors for each rotary frequency. `norm_offset`: what it has added to the weights
    of norms. `whole_every`: of so many layers the last attends to the whole text, the others to a window. `activation`:
    the one that it computes. `has_biases`: it reads those of all layers. `unread`: settings of the config that
    transformers does not read from the file.
    """

    name: str
    rotates_pairs: bool = False
    has_factors: bool = False
    norm_offset: float = 0.0
    whole_every: int = 1
    activation: str = "silu"
    has_biases: bool = False
    unread: tuple[str, ...] = ()


_BIASES = ("attention_bias", "mlp_bias")
# By `model_type` of config.json.
ARCHITECTURES = {
    "llama": _Row("llama", rotates_pairs=True, has_factors=True, has_biases=True),
    "mistral": _Row("llama", rotates_pairs=True, has_factors=True, has_biases=True),
    "qwen2": _Row("qwen2"),
    "qwen3": _Row("qwen3", unread=("head_dim",)),
    "qwen3_moe": _Row("qwen3moe", unread=("head_dim", "norm_topk_prob")),
    "gemma3_text": _Row(
        "gemma3",
        norm_offset=1.0,
        whole_every=6,
        activation="gelu_pytorch_tanh",
        unread=("query_pre_attn_scalar", "rope_parameters"),
    ),
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
    _check_fixed(config, row)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[row.name.upper()], config.num_hidden_layers)
    tensors = gguf_tensors(source, names.get_name, row.name, row.rotates_pairs, mix, row.norm_offset)
    writer = gguf.GGUFWriter(path, row.name)
    _add_sizes(writer, config, source)
    _add_window(writer, config, row)
    add_rotary(writer, config, has_factors=row.has_factors)
    factors = frequency_factors(config)
    if factors is not None:
        tensors.append(constant_tensor("rope_freqs.weight", factors))
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
    told = unnamed_settings(config)
    if told:
        log.warning(
            "%s: llama.cpp reads %s, transformers only where from_pretrained is given %s",
            path.name, " and ".join(told), ", ".join(f"{name}={value}" for name, value in told.items()),
        )  # fmt: skip
    return tensors


def unnamed_settings(config: Any) -> dict[str, Any]:
    """What transformers does not find in the file: it has no key for biases, and it leaves some keys out."""
    found: dict[str, Any] = {name: True for name in _BIASES if getattr(config, name, False)}
    usual = type(config)()
    for name in ARCHITECTURES[config.model_type].unread:
        if getattr(config, name) != getattr(usual, name, None):
            found[name] = getattr(config, name)
    if rotary_kind(config) != "default":
        found["rope_parameters"] = dict(config.rope_parameters)
    return found


def _add_sizes(writer: Any, config: Any, source: PackedSource) -> None:
    """`config`: as transformers has read it, in which older ways to say the same have become one."""
    if config.model_type == "qwen3_moe":
        _add_experts(writer, config)
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
    writer.add_layer_norm_rms_eps(float(config.rms_norm_eps))


def _check_fixed(config: Any, row: _Row) -> None:
    """Refuse what llama.cpp does not read from the file, where it is not as llama.cpp has it."""
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    fixed: dict[str, tuple[Any, Any]] = {"activation": (activation, row.activation)}
    if not row.has_biases:
        fixed |= {name: (bool(getattr(config, name, False)), False) for name in _BIASES}
    if row.name == "gemma3":
        width = config.hidden_size // config.num_attention_heads if config.num_hidden_layers == 62 else config.head_dim
        fixed["query_pre_attn_scalar"] = (config.query_pre_attn_scalar, width)
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            fixed[name] = (getattr(config, name), None)
    for name, (found, wanted) in fixed.items():
        if found != wanted:
            raise DeploymentError(f"{name} {found!r}: llama.cpp computes models of {row.name} with {wanted!r} alone")


def _add_experts(writer: Any, config: Any) -> None:
    if not config.norm_topk_prob:
        raise DeploymentError(
            "experts whose weights do not add up to one (norm_topk_prob: false): llama.cpp divides them by their sum"
        )
    writer.add_expert_count(int(config.num_experts))
    writer.add_expert_used_count(int(config.num_experts_per_tok))
    writer.add_expert_feed_forward_length(int(config.moe_intermediate_size))


def _add_window(writer: Any, config: Any, row: _Row) -> None:
    """Which layers attend to the last tokens alone is part of an architecture in llama.cpp, not of the file."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window is None or window >= config.max_position_embeddings:
        return
    if row.whole_every == 1:
        raise DeploymentError(
            f"attention to the last {window} tokens alone (sliding_window) is not written to GGUF files"
        )
    kinds = [
        "full_attention" if (i + 1) % row.whole_every == 0 else "sliding_attention"
        for i in range(len(config.layer_types))
    ]
    if list(config.layer_types) != kinds:
        raise DeploymentError(
            f"layer_types {list(config.layer_types)}: in GGUF files of {row.name} each {row.whole_every}th layer "
            "attends to the whole text, and the others to a window"
        )
    writer.add_sliding_window(int(window))
