"""Writes a packed model as one GGUF file, for llama.cpp and what is built on it.

Architectures are rows of a table. In `llama` files the rows of q and k are in another order, since llama.cpp rotates
neighbouring pairs; rows are whole packed rows, so that nothing is rounded again. Embeddings, norms and the output
layer keep the type they have; vectors become float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsebit.errors import CheckpointError, DeploymentError, MissingExtraError
from sparsebit.llm.checkpoint.gguf_blocks import BLOCK, BYTES, block_type, blocks_of, why_not
from sparsebit.llm.float_weight import integers
from sparsebit.llm.packed_source import PackedSource


@dataclass(frozen=True)
class _Row:
    """`name`: of the architecture in the file. `rotates_pairs`: rows of q and k are reordered.

    `pre`: llama.cpp's name for how the tokenizer splits text; None, if the tokenizer itself tells.
    """

    name: str
    rotates_pairs: bool
    pre: str | None = None


# By `model_type` of config.json.
ARCHITECTURES = {
    "llama": _Row("llama", rotates_pairs=True),
    "mistral": _Row("llama", rotates_pairs=True),
    "qwen2": _Row("qwen2", rotates_pairs=False, pre="qwen2"),
}


def gguf_package() -> Any:
    """The package gguf."""
    try:
        import gguf
    except ImportError:
        raise MissingExtraError("gguf", "gguf", "GGUF files") from None
    return gguf


@torch.no_grad()
def write_gguf(path: Path, source: PackedSource) -> None:
    """Write the packed model to `path`; one tensor is in memory at a time."""
    gguf = gguf_package()
    folder = source.skeleton.folder
    config = folder.config
    row = ARCHITECTURES.get(str(config.get("model_type")))
    if row is None:
        raise DeploymentError(
            f"GGUF files of model type {config.get('model_type')!r}: allowed: {', '.join(ARCHITECTURES)}"
        )
    writer = gguf.GGUFWriter(path, row.name)
    _add_sizes(writer, config, source)
    _add_tokenizer(writer, folder.path, row, int(config["vocab_size"]))
    tensors = list(_tensors(gguf, source, row))
    for item in tensors:
        writer.add_tensor_info(item.name, item.shape, item.numpy_type, item.nbytes, raw_dtype=item.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for item in tensors:
        writer.write_tensor_data(item.read().numpy())
    writer.close()


@dataclass(frozen=True)
class _Item:
    """A tensor of the file: `shape` in elements of `numpy_type`, `read()` gives the data."""

    name: str
    shape: tuple[int, ...]
    numpy_type: Any
    nbytes: int
    kind: Any
    read: Callable[[], Tensor]


def _tensors(gguf: Any, source: PackedSource, row: _Row) -> Iterator[_Item]:
    skeleton = source.skeleton
    folder, config = skeleton.folder, skeleton.folder.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[row.name.upper()], int(config["num_hidden_layers"]))
    heads = int(config["num_attention_heads"])
    key_heads = int(config.get("num_key_value_heads") or heads)

    def order(name: str, count: int) -> Tensor | None:
        if not row.rotates_pairs or not name.endswith(("q_proj", "k_proj")):
            return None
        return _pairs(count, heads if name.endswith("q_proj") else key_heads)

    packed_keys = {key for layer in source.formats for key in source.keys(layer)}
    shapes = folder.shapes()
    model_names = {file: model for model, file in reversed(list(skeleton.names.items()))}
    for key in folder:
        if key in packed_keys:
            continue
        module, _, suffix = model_names[key].rpartition(".")
        found = names.get_name(module)
        if found is None:
            raise DeploymentError(f"tensor {key} has no name in GGUF files of {row.name}")
        yield _float_item(gguf, folder.tensor, key, f"{found}.{suffix}", shapes[key], order(module, shapes[key][0]))
    for layer, number_format in source.formats.items():
        kind = block_type(number_format.bits, number_format.symmetric)
        out_features, in_features = skeleton.model.get_submodule(layer).weight.shape
        width = in_features // BLOCK * BYTES[kind]
        yield _Item(
            f"{names.get_name(layer)}.weight",
            (out_features, width),
            _numpy().uint8,
            out_features * width,
            gguf.GGMLQuantizationType[kind],
            partial(_blocks, source, layer, order(layer, out_features)),
        )


def _float_item(
    gguf: Any, read: Callable[[str], Tensor], key: str, name: str, shape: tuple[int, ...], order: Tensor | None
) -> _Item:
    stored = read(key).dtype
    dtype = torch.float32 if len(shape) == 1 or stored not in (torch.float16, torch.bfloat16) else stored
    count = 1
    for size in shape:
        count *= size

    def data() -> Tensor:
        value = read(key).to(dtype)
        value = value if order is None else value[order]
        return value.contiguous().view(torch.uint8) if dtype == torch.bfloat16 else value

    if dtype == torch.bfloat16:  # numpy has no such type: bytes
        kind = gguf.GGMLQuantizationType.BF16
        return _Item(name, (*shape[:-1], 2 * shape[-1]), _numpy().uint8, 2 * count, kind, data)
    numpy_type = _numpy().float16 if dtype == torch.float16 else _numpy().float32
    return _Item(name, shape, numpy_type, count * dtype.itemsize, None, data)


def _blocks(source: PackedSource, layer: str, order: Tensor | None) -> Tensor:
    packed = integers(source.read(layer))
    reason = why_not(packed)
    if reason is not None:
        raise DeploymentError(f"layer {layer}: {reason}")
    found = blocks_of(packed)
    return found if order is None else found[order]


def _pairs(count: int, heads: int) -> Tensor:
    """The rows of a head's halves in turn: llama.cpp rotates neighbours, transformers the halves."""
    return torch.arange(count).view(heads, 2, -1).transpose(1, 2).flatten()


def _add_sizes(writer: Any, config: dict[str, Any], source: PackedSource) -> None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", "default")
    if kind != "default":
        raise DeploymentError(f"rotary embeddings of type {kind!r} are not written to GGUF files yet; only 'default'")
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if window is not None and window < config["max_position_embeddings"]:
        raise DeploymentError(
            f"attention to the last {window} tokens alone (sliding_window) is not written to GGUF files"
        )
    heads = int(config["num_attention_heads"])
    size = int(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_name(source.skeleton.folder.path.name)
    writer.add_vocab_size(int(config["vocab_size"]))
    writer.add_context_length(int(config["max_position_embeddings"]))
    writer.add_embedding_length(int(config["hidden_size"]))
    writer.add_block_count(int(config["num_hidden_layers"]))
    writer.add_feed_forward_length(int(config["intermediate_size"]))
    writer.add_head_count(heads)
    writer.add_head_count_kv(int(config.get("num_key_value_heads") or heads))
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0))
    writer.add_layer_norm_rms_eps(float(config["rms_norm_eps"]))


def _add_tokenizer(writer: Any, folder: Path, row: _Row, vocab_size: int) -> None:
    """Byte-level BPE, the kind of Llama 3, Qwen and GPT-2."""
    path = folder / "tokenizer.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        model, added = found["model"], found["added_tokens"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); GGUF files hold the tokenizer") from None
    steps = _steps(found.get("pre_tokenizer"))
    if model.get("type") != "BPE" or not any(step.get("type") == "ByteLevel" for step in steps):
        raise DeploymentError(
            f"{path} is of type {model.get('type')!r}; GGUF files are written for byte-level BPE only"
        )
    tokens = [f"[PAD{number}]" for number in range(vocab_size)]
    types = [5] * vocab_size  # unused
    for text, number in model["vocab"].items():
        tokens[number], types[number] = text, 1  # normal
    for entry in added:
        tokens[entry["id"]], types[entry["id"]] = entry["content"], 3 if entry.get("special") else 4  # control, own
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre(steps, row, path))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    for name, number in _special_tokens(folder).items():
        getattr(writer, f"add_{name}")(number)


def _steps(pre_tokenizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    if pre_tokenizer is None:
        return []
    steps: list[dict[str, Any]] = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    return steps


def _pre(steps: list[dict[str, Any]], row: _Row, path: Path) -> str:
    """llama.cpp's name for how text is split before bytes are merged."""
    patterns = [step["pattern"].get("Regex", "") for step in steps if step.get("type") == "Split"]
    if not patterns and any(step.get("type") == "ByteLevel" and step.get("use_regex", True) for step in steps):
        return "gpt-2"
    if row.pre is not None:
        return row.pre
    if any(r"\p{N}{1,3}" in pattern for pattern in patterns):
        return "llama-bpe"
    raise DeploymentError(f"{path} splits text by {patterns}, which llama.cpp has no name for that is known here")


def _special_tokens(folder: Path) -> dict[str, int]:
    """The ids of the tokens at the beginning and the end, from the config."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found: dict[str, int] = {}
    for name in ("bos", "eos", "pad"):
        value = config.get(f"{name}_token_id")
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, int):
            found[f"{name}_token_id"] = value
    return found


def _numpy() -> Any:
    import numpy

    return numpy
