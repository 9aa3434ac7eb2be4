"""The formats of compressed-tensors, which transformers and vLLM read: `pack-quantized`; floats: `float_formats.py`.

A layer `NAME` has `NAME.weight_packed (out, words)`, `NAME.weight_scale (out, groups)`, `NAME.weight_shape`, and if it
is not symmetric `NAME.weight_zero_point`, packed along the outputs, `(words, groups)`. The config's
`quantization_config` says which layers have which number format.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsebit.errors import CheckpointError, DeploymentError
from sparsebit.llm.checkpoint import float_formats
from sparsebit.llm.checkpoint.layer_format import LayerFormat
from sparsebit.llm.layers.float_kinds import GROUPS
from sparsebit.llm.layers.float_weight import FloatWeight, Weight
from sparsebit.llm.layers.packed_weight import PackedWeight
from sparsebit.numerics.packing import WORD, num_words, pack, unpack

log = logging.getLogger(__name__)
_SUFFIXES = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
_INTEGERS = "pack-quantized"
_EXPERTS = re.compile(r"\.experts\.\d+\.")
_EXPERTS_TARGET = r"re:.*\.experts\.\d+\..*"


def suffixes(layer: LayerFormat) -> tuple[str, ...]:
    """The suffixes of a layer's tensors in the files; the first is always there."""
    return _SUFFIXES if layer.kind == "int" else float_formats.SUFFIXES[layer.kind]


def layer_tensors(name: str, packed: Weight) -> dict[str, Tensor]:
    """The tensors of a file for the layer that the file calls `name`."""
    if isinstance(packed, FloatWeight):
        return float_formats.layer_tensors(name, packed)
    tensors = {
        f"{name}.weight_packed": packed.qweight,
        f"{name}.weight_scale": packed.scales,
        f"{name}.weight_shape": torch.tensor([packed.out_features, packed.in_features]),
    }
    if packed.zeros is not None:
        tensors[f"{name}.weight_zero_point"] = pack(packed.zeros.mT, packed.bits).mT.contiguous()
    return tensors


def read_layer(tensors: Mapping[str, Tensor], name: str, layer: LayerFormat) -> Weight:
    """The inverse of `layer_tensors`; the number format is that of the config."""
    if layer.kind != "int":
        return float_formats.read_layer(tensors, name, layer.kind)
    missing = [key for key in ("weight_packed", "weight_scale", "weight_shape") if f"{name}.{key}" not in tensors]
    missing += [] if layer.symmetric or f"{name}.weight_zero_point" in tensors else ["weight_zero_point"]
    if missing:
        raise CheckpointError(f"layer {name} has no {', '.join(missing)}: the files and their config do not fit")
    out_features, in_features = tensors[f"{name}.weight_shape"].tolist()
    words = tensors[f"{name}.weight_packed"]
    has_gaps = _has_gaps(words, layer.bits, in_features)
    words = _without_gaps(words, layer.bits, in_features) if has_gaps else words
    zeros = None
    stored = tensors.get(f"{name}.weight_zero_point")
    if stored is not None and stored.dtype == torch.int32:
        stored = stored.mT.contiguous()
        stored = _without_gaps(stored, layer.bits, out_features) if has_gaps else stored
        zeros = unpack(stored, layer.bits, out_features).mT.contiguous()
    if layer.symmetric and stored is not None:
        if bool(stored.any() if zeros is None else (zeros != 1 << layer.bits - 1).any()):
            raise CheckpointError(f"layer {name} has zero points, and its config says that it is symmetric")
        zeros = None
    if not layer.symmetric and zeros is None:
        raise CheckpointError(f"layer {name} has zero points that are not packed: only packed ones are read")
    scales, size = tensors[f"{name}.weight_scale"], layer.group_size or in_features
    order = tensors.get(f"{name}.weight_g_idx")
    if order is not None and not bool(((order < 0) | (order == torch.arange(in_features) // size)).all()):
        raise CheckpointError(
            f"layer {name}: its columns are in groups by activation (weight_g_idx), not side by side: only files with "
            "static groups are read"
        )
    return PackedWeight(words, scales, zeros, layer.bits, size, in_features)


def _has_gaps(words: Tensor, bits: int, num_codes: int) -> bool:
    """Whether no code reaches into the next word: compressed-tensors before 0.18 packed 3 bits so."""
    return num_words(num_codes, bits) != words.shape[-1] == -(-num_codes // (WORD // bits))


def _without_gaps(words: Tensor, bits: int, num_codes: int) -> Tensor:
    """The words as `pack` makes them."""
    places = bits * torch.arange(WORD // bits, dtype=torch.int32)
    codes = words[..., None] >> places & (1 << bits) - 1
    return pack(codes.flatten(-2)[..., :num_codes], bits)


def make_config(layers: Mapping[str, LayerFormat], ignored: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of a model: the format of each layer by module name, and the layers that are float.

    One format for all layers is written for the class `Linear`; several are written for the layers by name. Experts
    have one format in all blocks, in one pattern: transformers finds it by the word `experts`, and reads no zero
    points.
    """
    of_experts = {layer for name, layer in layers.items() if _EXPERTS.search(name)}
    if len(of_experts) > 1 or any(not layer.symmetric for layer in of_experts):
        raise DeploymentError(
            f"experts of the formats {', '.join(map(str, of_experts))}: transformers reads one symmetric format for "
            "all experts of a model"
        )
    formats = list(dict.fromkeys(layers.values()))
    groups: dict[str, Any] = {}
    for number, layer in enumerate(formats):
        names = [name for name, found in layers.items() if found == layer]
        targets = [f"re:^{re.escape(name)}$" for name in names if not _EXPERTS.search(name)]
        targets += [_EXPERTS_TARGET] if layer in of_experts else []
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if len(formats) == 1 else targets,
            **(_scheme(layer) if layer.kind == "int" else float_formats.scheme(layer.kind)),
        }
    found = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": found.pop() if len(found) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(ignored),
        "kv_cache_scheme": None,
        # transformers 5.23 reads packed zero points only if it unpacks weights while loading, and then assumes one
        # format for all of them: with several it would compute wrong logits. Earlier versions unpack at the first
        # forward in any case; vLLM ignores the key.
        **({"dequantize": True} if len(formats) == 1 and not formats[0].symmetric else {}),
    }


def _scheme(layer: LayerFormat) -> dict[str, Any]:
    return {
        "weights": {
            "num_bits": layer.bits,
            "type": "int",
            "symmetric": layer.symmetric,
            "strategy": "group" if layer.group_size else "channel",
            "group_size": layer.group_size or None,
            "dynamic": False,
            "observer": "minmax",
        },
        "input_activations": None,
        "output_activations": None,
        "format": _INTEGERS,
    }


def read_config(config: Mapping[str, Any], linear_names: Sequence[str]) -> dict[str, LayerFormat]:
    """The format of each quantized layer of a model whose linear layers have these names."""
    known = (_INTEGERS, *float_formats.FORMATS.values())
    if config.get("quant_method") != "compressed-tensors" or config.get("format") not in known:
        raise CheckpointError(
            f"quantization {config.get('quant_method')!r} of format {config.get('format')!r}: allowed: "
            f"compressed-tensors of format {', '.join(known)}"
        )
    for key in ("transform_config", "sparsity_config"):
        if config.get(key):
            raise CheckpointError(f"compressed-tensors with {key} {config[key]}: such a model cannot be run here")
    if config.get("kv_cache_scheme"):
        log.warning("kv_cache_scheme %s: the cache of keys and values stays float here", config["kv_cache_scheme"])
    found: dict[str, LayerFormat] = {}
    for name in linear_names:
        if any(_specificity(target, name) in (0, 1) for target in config.get("ignore") or ()):
            continue
        matching = [
            (kind, target, group)
            for group in config["config_groups"].values()
            for target in group["targets"]
            if (kind := _specificity(target, name)) is not None
        ]
        if matching:
            found[name] = _layer_format(min(matching, key=lambda entry: entry[:2])[2], name)
    return found


def _layer_format(group: Mapping[str, Any], name: str) -> LayerFormat:
    weights = group.get("weights") or {}
    strategy = weights.get("strategy")
    activations = group.get("input_activations") or group.get("output_activations")
    kind = float_formats.kind_of(group, name)
    if kind is not None:
        return LayerFormat(8 if kind == "fp8" else 4, GROUPS[kind], True, kind)
    if weights.get("type", "int") != "int" or strategy not in ("group", "channel") or activations:
        raise CheckpointError(
            f"layer {name}: {weights.get('type')} weights of strategy {strategy!r}, activations "
            f"{activations}: allowed: int weights of strategy group or channel, float activations"
        )
    size = int(weights["group_size"]) if strategy == "group" else 0
    return LayerFormat(int(weights["num_bits"]), size, bool(weights.get("symmetric", True)))


def _specificity(target: str, name: str) -> int | None:
    """0 if the target is the layer's name; 1 for a pattern that matches it; 2 for its class; None if none applies.

    As in compressed-tensors, the smallest decides if several groups match a layer, then the order of the targets.
    """
    if target.startswith("re:"):
        return 1 if re.match(target.removeprefix("re:"), name) else None
    return 0 if target == name else 2 if target == "Linear" else None
