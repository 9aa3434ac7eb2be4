"""The formats of compressed-tensors for float weights: float-quantized, mxfp4-pack-quantized and nvfp4-pack-quantized.

A layer `NAME` has `NAME.weight` (fp8) or `NAME.weight_packed` (two 4-bit numbers in a byte), `NAME.weight_scale`, and
for nvfp4 `NAME.weight_global_scale`, by which the scales are divided.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sparsebit.errors import CheckpointError
from sparsebit.llm.layers.float_kinds import GROUPS, FloatKind
from sparsebit.llm.layers.float_weight import FloatWeight

FORMATS: dict[FloatKind, str] = {
    "fp8": "float-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "nvfp4": "nvfp4-pack-quantized",
}
SUFFIXES: dict[FloatKind, tuple[str, ...]] = {
    "fp8": ("weight", "weight_scale"),
    "mxfp4": ("weight_packed", "weight_scale"),
    "nvfp4": ("weight_packed", "weight_scale", "weight_global_scale"),
}
_FLOAT = {"type": "float", "symmetric": True, "dynamic": False}
# The types of the scales, as compressed-tensors names them; without them it takes a group of 32 for other 4-bit floats.
_WEIGHTS: dict[FloatKind, dict[str, Any]] = {
    "fp8": {"num_bits": 8, "strategy": "channel", "observer": "minmax", **_FLOAT},
    "mxfp4": {"num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8", **_FLOAT},
    "nvfp4": {
        "num_bits": 4,
        "strategy": "tensor_group",
        "group_size": 16,
        "scale_dtype": "torch.float8_e4m3fn",
        **_FLOAT,
    },
}
_TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}


def scheme(kind: FloatKind) -> dict[str, Any]:
    """The settings of a group of the config, besides its targets."""
    types = {} if kind == "fp8" else {"zp_dtype": _WEIGHTS[kind]["scale_dtype"]}
    return {
        "weights": {**_WEIGHTS[kind], **types},
        "input_activations": _TOKENS if kind == "fp8" else None,
        "output_activations": None,
        "format": FORMATS[kind],
    }


def kind_of(group: Mapping[str, Any], name: str) -> FloatKind | None:
    """The kind of a group of the config; None if its weights are whole numbers. Raises for others."""
    weights = group.get("weights") or {}
    if weights.get("type", "int") != "float":
        return None
    for kind, wanted in _WEIGHTS.items():
        same = all(weights.get(key) == wanted[key] for key in ("num_bits", "strategy", "symmetric"))
        is_grouped = GROUPS[kind] in (0, weights.get("group_size"))
        if same and is_grouped and _inputs(group) == (kind == "fp8"):
            return kind
    raise CheckpointError(
        f"layer {name}: float weights {weights} with activations {group.get('input_activations')}: allowed: fp8 per "
        "row with dynamic activations per token, mxfp4 and nvfp4 with float activations"
    )


def _inputs(group: Mapping[str, Any]) -> bool | None:
    """Whether activations are fp8, per token; None, if they are something else."""
    given = group.get("input_activations")
    if not given:
        return False
    return True if all(given.get(key) == value for key, value in _TOKENS.items()) else None


def layer_tensors(name: str, weight: FloatWeight) -> dict[str, Tensor]:
    """The tensors of a file for the layer that the file calls `name`."""
    values = (weight.qweight, weight.scales, *(() if weight.divisor is None else (weight.divisor,)))
    return {f"{name}.{suffix}": value for suffix, value in zip(SUFFIXES[weight.kind], values, strict=True)}


def read_layer(tensors: Mapping[str, Tensor], name: str, kind: FloatKind) -> FloatWeight:
    """The inverse of `layer_tensors`."""
    missing = [suffix for suffix in SUFFIXES[kind] if f"{name}.{suffix}" not in tensors]
    if missing:
        raise CheckpointError(f"layer {name} has no {', '.join(missing)}: the files and their config do not fit")
    return FloatWeight(kind, *(tensors[f"{name}.{suffix}"] for suffix in SUFFIXES[kind]))
