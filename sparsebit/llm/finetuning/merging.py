"""`merge`: combines an adapter and its model, packed again or in 16 bits; raises if the update is lost.

Rounding may drop an update that is smaller than a step of the number format, without any sign in the weights. So the
merged model is compared with model and adapter on the distributions of the next token (`measure_loss`). `_updates`
accepts plain LoRA on linear layers alone: other adapters do more than add to a weight.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsebit.errors import CheckpointError, ConfigError, DeploymentError
from sparsebit.folders import need_new, put_in_place, staging_folder
from sparsebit.llm.checkpoint import compressed_tensors
from sparsebit.llm.checkpoint.packed_source import PackedSource, float_layers, packed_source
from sparsebit.llm.converting.load_check import arbitrary_tokens
from sparsebit.llm.finetuning.layers.packed_lora import load_adapter
from sparsebit.llm.layers.packed_weight import PackedWeight
from sparsebit.llm.models.model_folder import ModelFolder
from sparsebit.llm.models.skeleton import Skeleton
from sparsebit.llm.quantizing.quantize_folder import quantize
from sparsebit.llm.quantizing.rounding import round_weight
from sparsebit.llm.recipe import Calibration, Recipe
from sparsebit.llm.running.loading import load
from sparsebit.llm.running.perplexity import perplexity
from sparsebit.tensor_files import load_tensors

PACKED, REQUANTIZED, _BASE = "packed", "requantized", "base_model_name_or_path"
_MATRIX = re.compile(r"\.lora_(embedding_)?[AB](\.weight)?$")
_HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
KINDS: dict[str, torch.dtype | None] = {PACKED: None, REQUANTIZED: None, **_HALVES}
MAX_LOSS = 0.1


@dataclass(frozen=True)
class MergedModel:
    """The result of `merge`. `logit_error`: of the merged model against model and adapter, root mean square, relative.

    `kl_divergence`: of the distributions of the next token, mean, in nats. `update_lost`: this divergence relative to
    that of the model without its adapter: 0, nothing is lost; 1, all of it; None, if the adapter has no effect.
    Perplexities are None without text: of the model with its adapter, and merged.
    """

    folder: Path
    kind: str
    num_layers: int
    logit_error: float
    kl_divergence: float
    update_lost: float | None
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
    calibration: Calibration | None = None,
    max_loss: float = MAX_LOSS,
    trust_remote_code: bool = False,
) -> MergedModel:
    """Add the adapter's updates to the weights of its model and write the result as a model folder.

    `model`: the folder of the model; the one that the adapter names, if None. `kind`: "packed", in the number format
    that each layer has (layers with an adapter are rounded again, others keep their codes); "requantized", in the same
    number format, all layers quantized by GPTQ with the text of `calibration`; "bfloat16" or "float16".

    Rounding to nearest drops updates that are smaller than a step of the number format. The loss is measured on
    `windows (n, length)` of tokens, on arbitrary tokens if None: a result that loses more than `max_loss` of the
    adapter's effect (`MergedModel.update_lost`) is an error and not kept.
    """
    target = Path(output)
    need_new(target)
    refusals: dict[str, object] = {
        f"kind={kind!r}: allowed: {', '.join(KINDS)}": kind not in KINDS,
        f"max_loss={max_loss}: allowed: 0 or more; {MAX_LOSS} is a tenth of the update": not max_loss >= 0,
        f"calibration with kind={kind!r}: it is for kind {REQUANTIZED!r}": calibration and kind != REQUANTIZED,
    }
    _refuse(refusals)
    base = Path(model) if model is not None else named_base(Path(adapter))
    skeleton = Skeleton(ModelFolder(base), trust_remote_code=trust_remote_code)
    source = packed_source(skeleton)
    refusals = {
        f"{base} has Conv1D layers: merging writes linear layers, which nothing reads": skeleton.transposed,
        f"{base} is a float model: merge to bfloat16 or float16, then quantize it": not source.formats
        and kind not in _HALVES,
    }
    _refuse(refusals)
    recipe = _recipe_of(source, calibration) if kind == REQUANTIZED else None
    adapted = load_adapter(load(base, dtype=torch.float32, trust_remote_code=trust_remote_code), adapter)
    updates = _updates(adapted, Path(adapter), skeleton)
    with staging_folder(target, alone=True) as staging:
        made = staging / target.name
        if recipe is None:
            _write(made, skeleton, source, updates, KINDS[kind])
        else:
            floats = staging / "float" / target.name
            _write(floats, skeleton, source, updates, _type_of_files(skeleton, source))
            quantize(floats, made, recipe, calibration, trust_remote_code=trust_remote_code)
        merged = load(made, dtype=torch.float32, trust_remote_code=trust_remote_code)
        loss = measure_loss(adapted, merged, arbitrary_tokens(merged) if windows is None else windows)
        _need_update(loss, max_loss, kind, is_text=windows is not None)
        before = after = None
        if windows is not None:
            before, after = (perplexity(one, windows).value for one in (adapted, merged))
        put_in_place(made, target)
    found = (loss.logit_error, loss.divergence, loss.share)
    return MergedModel(target, kind, len(updates), *found, before, after)


def _refuse(refusals: Mapping[str, object]) -> None:
    """Raise the first text whose reason is true, or not empty."""
    for text, reason in refusals.items():
        if reason:
            raise ConfigError(text)


def _recipe_of(source: PackedSource, calibration: Calibration | None) -> Recipe:
    """GPTQ with the number format that all packed layers have."""
    layer, *others = set(source.formats.values())
    is_float = layer.kind != "int"
    refusals = {
        f"kind={REQUANTIZED!r}: the layers have {len(others) + 1} different number formats; merge to bfloat16 or "
        "float16, then quantize that with candidate bits": others,
        f"calibration with {layer.kind} weights: these are rounded without text; leave it out": is_float
        and calibration,
        f"kind={REQUANTIZED!r} needs calibration text (--calibration)": not is_float and calibration is None,
    }
    _refuse(refusals)
    if layer.kind != "int":
        return Recipe(method=layer.kind)
    return Recipe(bits=layer.bits, group_size=layer.group_size, symmetric=layer.symmetric)


def _type_of_files(skeleton: Skeleton, source: PackedSource) -> torch.dtype:
    """The type of the weights that are not packed."""
    packed = {key for layer in source.formats for key in source.keys(layer)}
    left = (skeleton.folder.tensor(key).dtype for key in skeleton.folder if key not in packed)
    return next((dtype for dtype in left if dtype in (torch.float16, torch.bfloat16)), torch.float32)


def _need_update(loss: UpdateLoss, max_loss: float, kind: str, *, is_text: bool) -> None:
    """Raise for a merged model that has lost the update, because it would be mistaken for the fine-tuned one."""
    if loss.share is None or loss.share <= max_loss:
        return
    tokens = "the text" if is_text else "arbitrary tokens; --text measures on a text, best one like the training data"
    ways = {
        "float16": "merge to 16 bits (--to float16 or bfloat16)",
        REQUANTIZED: "quantize the merged weights with text (--to requantized --calibration FILE)",
        "": f"accept the loss (--max-loss {math.ceil(loss.share * 100) / 100:g})",
    }
    raise DeploymentError(
        f"merging to {kind} loses {loss.share:.0%} of what the adapter changes in the predictions of the next token "
        f"({loss.divergence:.2g} of {loss.effect:.2g} nats, measured on {tokens}); allowed: {max_loss:.0%}; nothing is "
        f"kept. Either {', or '.join(way for name, way in ways.items() if name != kind)}"
    )


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
    """By the name of its layer in the model, the module that computes the update of its weight."""
    assert len(adapted.active_adapters) == 1, "load_adapter has loaded one"
    parts = adapted.get_base_model().named_modules()
    found = {name: part for name, part in parts if hasattr(part, "get_delta_weight") and hasattr(part, "lora_A")}
    tensors, _ = load_tensors(adapter / "adapter_model.safetensors")
    shared = Counter(skeleton.names[name] for name in skeleton.model.state_dict() if name in skeleton.names)
    known = {f"{name}.weight" for name in packed_source(skeleton).formats} | skeleton.names.keys()
    refusals = {
        "which replaces a whole layer": [
            name for name, _ in adapted.named_modules() if "modules_to_save" in name.split(".")
        ],
        "which does not update a weight": [
            name for name in tensors if not _MATRIX.search(name) and not _is_in_files(name, tensors[name], skeleton)
        ],
        "which does more than add an update to its weight (DoRA, aLoRA and others)": [
            name for name, part in found.items() if getattr(part, "lora_variant", None)
        ],
        "which the files of the model do not have": [name for name in found if f"{name}.weight" not in known],
        "whose weight is that of another layer too (tied)": [
            name for name in found if shared[skeleton.names.get(f"{name}.weight", "")] > 1
        ],
    }
    for why, names in refusals.items():
        if names:
            raise ConfigError(f"the adapter has {names[0]}, {why}; only plain LoRA updates of linear layers are merged")
    moved = [name for name, part in found.items() if not _is_on_files(name, part, skeleton)]
    if moved:
        raise ConfigError(
            f"the adapter changed the weight below it at {moved[0]} (init_lora_weights: PiSSA, OLoRA and others): its "
            "update does not belong to the weight of the files. Convert it to plain LoRA: peft's "
            "path_initial_model_for_weight_conversion"
        )
    return found


def _is_in_files(name: str, value: Tensor, skeleton: Skeleton) -> bool:
    """Whether a tensor of an adapter is a copy of one of the model, which peft saves with updates of embeddings."""
    own = skeleton.names.get(name.removeprefix("base_model.model.").replace(".base_layer.", "."))
    stored = None if own is None else skeleton.folder.tensor(own)
    return stored is not None and stored.shape == value.shape and torch.equal(stored.float(), value.float())


def _is_on_files(name: str, part: Any, skeleton: Skeleton) -> bool:
    """Whether the weight below an adapter is that of the files; a packed one is, otherwise `load_adapter` raises."""
    weight = getattr(part.get_base_layer(), "weight", None)
    return weight is None or torch.equal(weight, skeleton.read(f"{name}.weight", weight))


def _update(part: Any) -> Tensor:
    delta: Tensor = part.get_delta_weight(part.active_adapters[0])
    return delta.detach().float().cpu()


def _write(
    target: Path, skeleton: Skeleton, files: PackedSource, updates: Mapping[str, Any], dtype: torch.dtype | None
) -> None:
    """Shards as those of the source. `dtype`: None, if packed layers are packed again."""
    config = {key: value for key, value in skeleton.folder.config.items() if key != "quantization_config"}
    if dtype is None:
        config["quantization_config"] = compressed_tensors.make_config(
            files.formats, float_layers(skeleton, files.formats)
        )
    else:
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
    dense = {skeleton.names[f"{name}.weight"]: name for name in updates if name not in files.formats}

    def merged_layer(layer: str) -> Mapping[str, Tensor]:
        packed = files.read(layer)
        update = _update(updates[layer]) if layer in updates else None
        if dtype is not None:
            weight = packed.dequantize(torch.float32)
            key = f"{files.file_name(layer)}.weight"
            return {key: _rounded(weight if update is None else weight + update, dtype, key)}
        if update is not None:
            if not isinstance(packed, PackedWeight):
                raise ConfigError(f"{layer} has {packed.kind} weights: merge to requantized, bfloat16 or float16")
            packed = add_to_packed(packed, update, layer)
        return compressed_tensors.layer_tensors(files.file_name(layer), packed)

    def merged_tensor(key: str, value: Tensor) -> Tensor:
        if key in dense:
            value = _rounded(value.float() + _update(updates[dense[key]]), value.dtype, key)
        return _rounded(value, dtype, key) if dtype is not None and value.is_floating_point() else value

    files.rewrite(target, config, merged_layer, merged_tensor, what="merging")


def _rounded(value: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """The value in the type; a value beyond the largest number of the type is an error."""
    found = value.to(dtype)
    if value.isfinite().all() and not found.isfinite().all():
        raise ConfigError(f"{name} has values up to {value.abs().max():.3g}, too large for {dtype}; merge to bfloat16")
    return found


def add_to_packed(packed: PackedWeight, update: Tensor, name: str) -> PackedWeight:
    """The weight plus `update (out, in)` in the same format; each group gets a new scale or keeps its own."""
    wanted = packed.dequantize(torch.float32) + update
    recipe = Recipe("rtn", packed.bits, packed.group_size, packed.symmetric, "nearest")
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


# --- how much of the adapter's effect is lost


# Below this divergence, in nats, rounding of sums exceeds the effect of the adapter.
_LEAST = 1e-9
_POSITIONS = 64  # positions whose distributions are in memory in float64 at a time


@dataclass(frozen=True)
class UpdateLoss:
    """The distance of a merged model from the model with its adapter, on the same tokens.

    `logit_error`: root mean square, relative. `divergence`: `KL(adapted || merged)` of the distributions of the next
    token, mean, in nats. `effect`: `KL(adapted || base)`, the divergence of the model without its adapter.
    """

    logit_error: float
    divergence: float
    effect: float

    @property
    def share(self) -> float | None:
        """0: the merged model predicts as with the adapter; 1: as without it. None: the adapter has no effect."""
        return None if self.effect < _LEAST else self.divergence / self.effect


@torch.no_grad()
def measure_loss(adapted: Any, merged: Any, tokens: Tensor) -> UpdateLoss:
    """`adapted`: a model of peft, run with and without its adapter. `tokens (n, length)`: run one row at a time."""
    error = size = divergence = effect = 0.0
    for row in tokens.split(1):
        wanted, found = (model(input_ids=row, use_cache=False).logits[0] for model in (adapted, merged))
        with adapted.disable_adapter():
            plain = adapted(input_ids=row, use_cache=False).logits[0]
        for wanted_part, *others in zip(*(one.split(_POSITIONS) for one in (wanted, found, plain)), strict=True):
            expected = wanted_part.double()
            found_part, plain_part = (one.double() for one in others)
            error += float((found_part - expected).square().sum())
            size += float(expected.square().sum())
            divergence += _divergence(expected, found_part)
            effect += _divergence(expected, plain_part)
    count = tokens.numel()
    return UpdateLoss((error / max(size, 1e-30)) ** 0.5, divergence / count, effect / count)


def _divergence(expected: Tensor, found: Tensor) -> float:
    """Sum over rows of the Kullback-Leibler divergence of the distributions with these logits."""
    theirs, ours = expected.log_softmax(-1), found.log_softmax(-1)
    return float((theirs.exp() * (theirs - ours)).sum())
