"""`merge`: an adapter and its model as one model, packed again or in 16 bits, with what the merging loses."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import CheckpointError, ConfigError
from sparsebit.folders import need_new, put_in_place, staging_folder, write_text
from sparsebit.llm.checkpoint import compressed_tensors
from sparsebit.llm.file_checksums import write_checksums
from sparsebit.llm.finetuning.packed_lora import load_adapter
from sparsebit.llm.loading import load
from sparsebit.llm.model_folder import ModelFolder
from sparsebit.llm.packed_folder import copy_small_files
from sparsebit.llm.packed_source import PackedSource, packed_source
from sparsebit.llm.packed_weight import PackedWeight
from sparsebit.llm.perplexity import perplexity
from sparsebit.llm.recipe import Recipe
from sparsebit.llm.rounding import round_weight
from sparsebit.llm.separate_experts import routers
from sparsebit.llm.shards import Shards
from sparsebit.llm.skeleton import Skeleton
from sparsebit.progress import track
from sparsebit.tensor_files import load_tensors

PACKED, _BASE = "packed", "base_model_name_or_path"
_MATRIX = re.compile(r"\.lora_(embedding_)?[AB](\.weight)?$")
KINDS: dict[str, torch.dtype | None] = {PACKED: None, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class MergedModel:
    """What `merge` made. `logit_error`: of the merged model against model and adapter, root mean square, relative.

    `kl_divergence`: of the distributions of the next token, mean, in nats. Perplexities are None without text: of the
    model with its adapter, and merged.
    """

    folder: Path
    kind: str
    num_layers: int
    logit_error: float
    kl_divergence: float
    perplexity_with_adapter: float | None
    perplexity_merged: float | None


@torch.no_grad()
def merge(
    adapter: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    model: str | os.PathLike[str] | None = None,
    kind: str = PACKED,
    windows: Tensor | None = None,
    trust_remote_code: bool = False,
) -> MergedModel:
    """Add the adapter's updates to the weights of its model and write the result as a model folder.

    `model`: the folder of the model; the one that the adapter names, if None. `kind`: "packed", in the number format
    that each layer has (layers with an adapter are rounded again, others keep their codes), "bfloat16" or "float16".
    Rounding loses a part of what was learned: `windows (n, length)` of tokens measure how much; without them arbitrary
    tokens do, and only of the logits. For fewer losses merge to 16 bits and quantize that with text.
    """
    target = Path(output)
    if kind not in KINDS:
        raise ConfigError(f"kind={kind!r}: allowed: {', '.join(KINDS)}")
    need_new(target)
    base = Path(model) if model is not None else named_base(Path(adapter))
    skeleton = Skeleton(ModelFolder(base), trust_remote_code=trust_remote_code)
    source = packed_source(skeleton)
    if source is None and kind == PACKED:
        raise ConfigError(f"{base} is a float model: merge to bfloat16 or float16, then quantize it")
    adapted = load_adapter(load(base, dtype=torch.float32, trust_remote_code=trust_remote_code), adapter)
    updates = _updates(adapted, Path(adapter), skeleton)
    with staging_folder(target, alone=True) as staging:
        made = staging / target.name
        _write(made, skeleton, source, updates, KINDS[kind])
        merged = load(made, dtype=torch.float32, trust_remote_code=trust_remote_code)
        tokens = _arbitrary(merged) if windows is None else windows
        found = _compare(adapted, merged, tokens)
        before = after = None
        if windows is not None:
            before, after = (perplexity(one, windows).value for one in (adapted, merged))
        put_in_place(made, target)
    return MergedModel(target, kind, len(updates), *found, before, after)


def named_base(adapter: Path) -> Path:
    """The folder of the model that the adapter was trained on, as its files name it."""
    try:
        name = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8")).get(_BASE)
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{adapter} is not the folder of an adapter ({error})") from None
    if not name or not Path(name).is_dir():
        raise ConfigError(f"{adapter} names the model {name!r}, which is not a folder here: give it (--model)")
    return Path(name)


def _updates(adapted: Any, adapter: Path, skeleton: Skeleton) -> dict[str, Any]:
    """By the name of its layer in the model, the module that gives the update of its weight."""
    names = set(adapted.active_adapters)
    if len(names) != 1:
        raise ConfigError(f"the model has {len(names)} active adapters; merge one at a time")
    found = {
        name: part
        for name, part in adapted.get_base_model().named_modules()
        if hasattr(part, "get_delta_weight") and hasattr(part, "lora_A")
    }
    other = [name for name, part in adapted.named_modules() if "modules_to_save" in name.split(".")]
    if other:
        raise ConfigError(f"the adapter replaces whole layers ({other[0]}); only updates of linear layers are merged")
    tensors, _ = load_tensors(adapter / "adapter_model.safetensors")
    other = [name for name in tensors if not _MATRIX.search(name) and not _is_in_files(name, tensors[name], skeleton)]
    if other:
        raise ConfigError(
            f"the adapter has {other[0]}, which does not update a weight; only updates of weights are merged"
        )
    other = [name for name, part in found.items() if getattr(part, "lora_variant", None)]
    if other:
        raise ConfigError(
            f"the adapter of {other[0]} does more than add an update to its weight (DoRA, aLoRA and others); only "
            "plain LoRA is merged"
        )
    other = [name for name in found if f"{name}.weight" not in skeleton.names and name not in _packed_names(skeleton)]
    if other:
        raise ConfigError(f"the adapter has a layer {other[0]}, which the files of the model do not have")
    shared = Counter(skeleton.names[name] for name in skeleton.model.state_dict() if name in skeleton.names)
    other = [name for name in found if shared[skeleton.names.get(f"{name}.weight", "")] > 1]
    if other:
        raise ConfigError(f"the adapter changes {other[0]}, whose weight is that of another layer too (tied)")
    other = [name for name, part in found.items() if not _is_on_files(name, part, skeleton)]
    if other:
        raise ConfigError(
            f"the adapter changed the weight below it at {other[0]} (init_lora_weights: PiSSA, OLoRA and others): its "
            "update does not belong to the weight of the files. Convert it to plain LoRA: peft's save_pretrained with "
            "path_initial_model_for_weight_conversion"
        )
    return found


def _is_in_files(name: str, value: Tensor, skeleton: Skeleton) -> bool:
    """Whether a tensor of an adapter is a copy of one of the model, which peft keeps beside updates of embeddings."""
    own = skeleton.names.get(name.removeprefix("base_model.model.").replace(".base_layer.", "."))
    stored = None if own is None else skeleton.folder.tensor(own)
    return stored is not None and stored.shape == value.shape and torch.equal(stored.float(), value.float())


def _is_on_files(name: str, part: Any, skeleton: Skeleton) -> bool:
    """Whether the weight below an adapter is that of the files; a packed one is, else `load_adapter` refuses it."""
    weight = getattr(part.get_base_layer(), "weight", None)
    return weight is None or torch.equal(weight, skeleton.read(f"{name}.weight", weight))


def _packed_names(skeleton: Skeleton) -> Collection[str]:
    source = packed_source(skeleton)
    return () if source is None else source.formats


def _update(part: Any) -> Tensor:
    delta: Tensor = part.get_delta_weight(part.active_adapters[0])
    return delta.detach().float().cpu()


def _write(
    target: Path,
    skeleton: Skeleton,
    source: PackedSource | None,
    updates: Mapping[str, Any],
    dtype: torch.dtype | None,
) -> None:
    """Shards as those of the source. `dtype`: None, if packed layers are packed again."""
    folder = skeleton.folder
    target.mkdir(parents=True)
    copy_small_files(folder.path, target)
    config = {key: value for key, value in folder.config.items() if key != "quantization_config"}
    formats = {} if source is None else source.formats
    if dtype is None:
        linear_names = [name for name, part in skeleton.model.named_modules() if type(part) is nn.Linear]
        floats = [*(name for name in linear_names if name not in formats), *routers(skeleton)]
        config["quantization_config"] = compressed_tensors.make_config(formats, floats)
    else:
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
    write_text(target / "config.json", json.dumps(config, indent=2) + "\n")
    layers_of: dict[Path, list[str]] = {}
    packed_keys: set[str] = set()
    for layer in formats:
        assert source is not None
        packed_keys |= set(source.keys(layer))
        layers_of.setdefault(folder.files[source.keys(layer)[0]], []).append(layer)
    dense = {skeleton.names[f"{name}.weight"]: name for name in updates if name not in formats}
    files = list(dict.fromkeys(folder.files.values()))
    shards = Shards(target, len(files))
    for file in track(files, "merging"):
        tensors: dict[str, Tensor] = {}
        for key in (key for key, path in folder.files.items() if path == file and key not in packed_keys):
            value = folder.tensor(key)
            if key in dense:
                value = _rounded(value.float() + _update(updates[dense[key]]), value.dtype, key)
            tensors[key] = _rounded(value, dtype, key) if dtype is not None and value.is_floating_point() else value
        for layer in layers_of.get(file, ()):
            assert source is not None
            packed = source.read(layer)
            update = _update(updates[layer]) if layer in updates else None
            if dtype is None:
                if update is not None:
                    if not isinstance(packed, PackedWeight):
                        raise ConfigError(f"{layer} has {formats[layer]} weights; merge to bfloat16 or float16 instead")
                    packed = add_to_packed(packed, update, layer)
                tensors |= compressed_tensors.layer_tensors(source.file_name(layer), packed)
            else:
                weight = packed.dequantize(torch.float32)
                key = f"{source.file_name(layer)}.weight"
                tensors[key] = _rounded(weight if update is None else weight + update, dtype, key)
        shards.write(tensors)
        folder.close()
    shards.finish()
    write_checksums(target)


def _rounded(value: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """The value in the type; refused is one that the type has no number for."""
    found = value.to(dtype)
    if value.isfinite().all() and not found.isfinite().all():
        raise ConfigError(f"{name} has values up to {value.abs().max():.3g}, too large for {dtype}; merge to bfloat16")
    return found


def add_to_packed(packed: PackedWeight, update: Tensor, name: str) -> PackedWeight:
    """The weight plus `update (out, in)` in the same number format.

    Each group gets a searched scale for its new values, or keeps the one it has, whichever is nearer to them.
    """
    wanted = packed.dequantize(torch.float32) + update
    recipe = Recipe(
        method="rtn",
        bits=packed.bits,
        group_size=packed.group_size,
        symmetric=packed.symmetric,
        scale_search="nearest",
    )
    fresh = round_weight(wanted, None, recipe, name, stored=packed.scales.dtype).packed
    assert isinstance(fresh, PackedWeight)
    kept = _on_grid(wanted, packed)
    errors = [(one.dequantize(torch.float32) - wanted).unflatten(1, (-1, packed.group_size)) for one in (fresh, kept)]
    is_fresh = errors[0].square().sum(-1) <= errors[1].square().sum(-1)
    codes = torch.where(is_fresh.repeat_interleave(packed.group_size, 1), fresh.codes(), kept.codes())
    zeros = None
    if packed.zeros is not None:
        assert fresh.zeros is not None
        zeros = torch.where(is_fresh, fresh.zeros, packed.zeros)
    return PackedWeight.from_codes(codes, torch.where(is_fresh, fresh.scales, packed.scales), zeros, packed.bits)


def _on_grid(wanted: Tensor, packed: PackedWeight) -> PackedWeight:
    """The nearest codes with the scales and zero points that the weight has."""
    grouped = wanted.unflatten(1, (-1, packed.group_size))
    middle = 1 << packed.bits - 1 if packed.zeros is None else packed.zeros[..., None].float()
    scales = packed.scales.float()[..., None]
    codes = (grouped / torch.where(scales == 0, 1.0, scales) + middle).round().clamp(0, (1 << packed.bits) - 1)
    return PackedWeight.from_codes(codes.flatten(1).to(torch.uint8), packed.scales, packed.zeros, packed.bits)


def _arbitrary(model: Any) -> Tensor:
    size = int(model.config.get_text_config().vocab_size)
    return torch.randint(0, size, (1, 64), generator=torch.Generator().manual_seed(0))


def _compare(adapted: Any, merged: Any, tokens: Tensor) -> tuple[float, float]:
    """The relative error of the logits, and the mean divergence of the next token's distributions."""
    error = size = divergence = 0.0
    count = 0
    for row in tokens.split(1):
        wanted, found = (model(input_ids=row, use_cache=False).logits.float() for model in (adapted, merged))
        error += float((found - wanted).double().square().sum())
        size += float(wanted.double().square().sum())
        ours, theirs = (one.log_softmax(-1) for one in (found, wanted))
        divergence += float((theirs.exp() * (theirs - ours)).sum(-1).double().sum())
        count += row.numel()
    return (error / max(size, 1e-30)) ** 0.5, divergence / count
