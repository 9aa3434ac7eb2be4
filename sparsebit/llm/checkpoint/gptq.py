"""The format of GPTQ checkpoints, versions 1 and 2, which gptqmodel, transformers and vLLM read.

A layer `NAME` has `NAME.qweight (words, out)`, packed along the inputs; `NAME.scales (groups, out)` in float16;
`NAME.qzeros (groups, words)`, packed along the outputs; `NAME.g_idx (in,)`, the group of each input. Version 1 stores
zero points minus one, so a zero point of 0 cannot be stored: its readers would borrow from the neighbouring one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from sparsebit.errors import CheckpointError, DeploymentError
from sparsebit.llm.checkpoint.layer_format import LayerFormat, layer_parts
from sparsebit.llm.layers.packed_weight import PackedWeight
from sparsebit.numerics.packing import WORD, pack, unpack
from sparsebit.version import __version__

Version = Literal[1, 2]
SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")
_NAMES: dict[Version, str] = {1: "gptq", 2: "gptq_v2"}


def layer_tensors(name: str, packed: PackedWeight, version: Version) -> dict[str, Tensor]:
    """The tensors of a file for the layer that the file calls `name`."""
    refusal = why_not(packed, version)
    if refusal is not None:
        raise DeploymentError(f"layer {name} has {refusal}")
    return file_tensors(name, packed, zero_points(packed) - (1 if version == 1 else 0), torch.float16)


def file_tensors(name: str, packed: PackedWeight, zeros: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors with these zero points `(out, groups)` in the file, and scales in `dtype`."""
    return {
        f"{name}.qweight": packed.qweight.t().contiguous(),
        f"{name}.qzeros": pack(zeros.t(), packed.bits),
        f"{name}.scales": packed.scales.t().to(dtype).contiguous(),
        f"{name}.g_idx": (torch.arange(packed.in_features) // packed.group_size).to(torch.int32),
    }


def zero_points(packed: PackedWeight) -> Tensor:
    if packed.zeros is not None:
        return packed.zeros
    return torch.full_like(packed.scales, 1 << packed.bits - 1, dtype=torch.uint8)


def why_not(packed: PackedWeight, version: Version) -> str | None:
    """Why a layer cannot be stored in the format; None, if it can."""
    if packed.in_features % WORD or packed.out_features % WORD:
        return f"the shape {packed.out_features} x {packed.in_features}: GPTQ files need multiples of {WORD}"
    if version == 1 and packed.zeros is not None and bool((packed.zeros == 0).any()):
        return "zero points of 0, which version 1 cannot store: write version 2 (gptq), or quantize with --symmetric"
    if not packed.has_half_scales:
        return "scales that float16 cannot hold: keep compressed-tensors"
    return None


def read_layer(tensors: Mapping[str, Tensor], name: str, layer: LayerFormat, version: Version) -> PackedWeight:
    """The inverse of `layer_tensors`; the number format is that of the config."""
    qweight, qzeros, scales = (part.contiguous() for part in layer_parts(tensors, name, SUFFIXES[:3]))
    qweight, scales, middle = qweight.t().contiguous(), scales.t().contiguous(), 1 << layer.bits - 1
    in_features = qweight.shape[1] * WORD // layer.bits
    size = layer.group_size or in_features
    zeros = unpack(qzeros, layer.bits, len(scales)).t().contiguous()
    is_wrapped = version == 1 and bool((zeros == (1 << layer.bits) - 1).any())
    zeros += 2 - version
    order, problem = tensors.get(f"{name}.g_idx"), None
    if order is not None and not torch.equal(order.long(), torch.arange(in_features) // size):
        problem = "columns in groups by activation (desc_act), not side by side: only static groups are read"
    elif is_wrapped:
        problem = "a zero point that version 1 cannot store: readers disagree about it. Write the file in version 2"
    elif layer.symmetric and not bool((zeros == middle).all()):
        problem = f"other zero points than {middle}, and is symmetric"
    if problem is not None:
        raise CheckpointError(f"layer {name} has {problem}")
    return PackedWeight(qweight, scales, None if layer.symmetric else zeros, layer.bits, size, in_features)


def make_config(layers: Mapping[str, LayerFormat], version: Version) -> dict[str, Any]:
    """The `quantization_config` of a model: the commonest format for all layers, and the others by name (`dynamic`)."""
    usual = Counter(layers.values()).most_common(1)[0][0]
    flags = {"desc_act": False, "static_groups": False, "true_sequential": True, "lm_head": False}
    meta = {"quantizer": [f"sparsebit:{__version__}"]}
    names: dict[str, Any] = {"quant_method": "gptq", "checkpoint_format": _NAMES[version]}
    others = {f"+:^{re.escape(name)}$": _entry(layer) for name, layer in layers.items() if layer != usual}
    return {**names, **_entry(usual), **flags, "meta": meta, **({"dynamic": others} if others else {})}


def read_config(config: Mapping[str, Any], packed_names: list[str]) -> tuple[dict[str, LayerFormat], Version]:
    """The format of each packed layer by its name, and the version."""
    # `format` is the newer key; if both are given, transformers uses the older one.
    name = str(config.get("checkpoint_format") or config.get("format") or _NAMES[1]).lower()
    versions: dict[str, Version] = {text: number for number, text in _NAMES.items()}
    words = str(config.get("pack_dtype") or "int32")
    if name not in versions or words != "int32":
        known = ", ".join(versions)
        raise CheckpointError(f"GPTQ files of format {name!r}, pack_dtype {words!r}: allowed: {known}; int32")
    found: dict[str, LayerFormat] = {}
    for layer in packed_names:
        entry = dict(config)
        for pattern, changes in (config.get("dynamic") or {}).items():
            if not pattern.startswith("-:") and re.match(pattern.removeprefix("+:"), layer):
                entry |= changes
                break
        size = int(entry["group_size"])
        found[layer] = LayerFormat(int(entry["bits"]), max(size, 0), bool(entry.get("sym", True)))
    return found, versions[name]


def _entry(layer: LayerFormat) -> dict[str, Any]:
    return {"bits": layer.bits, "group_size": layer.group_size or -1, "sym": layer.symmetric}
