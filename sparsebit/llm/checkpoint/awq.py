"""The format of AutoAWQ's files (version "gemm"), which transformers, vLLM and others read.

A layer `NAME` of 4 bits has `NAME.qweight (in, out/8)` int32, `NAME.qzeros (groups, out/8)` int32 and
`NAME.scales (groups, out)` float16; a value is `(code - zero) * scale`. Words are packed along the outputs: eight
neighbouring outputs share one, and place `i` of a word, from its lowest bits, holds output `ORDER[i]` of the eight.
The format has one number format for all layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsebit.errors import CheckpointError, DeploymentError
from sparsebit.llm.checkpoint.gptq import zero_points
from sparsebit.llm.checkpoint.layer_format import LayerFormat, layer_parts
from sparsebit.llm.layers.packed_weight import PackedWeight
from sparsebit.numerics.packing import pack, unpack

SUFFIXES = ("qweight", "qzeros", "scales")
BITS = 4
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PLACES = tuple(ORDER.index(output) for output in range(len(ORDER)))


def layer_tensors(name: str, packed: PackedWeight) -> dict[str, Tensor]:
    """The tensors of a file for the layer that the file calls `name`."""
    problem = None
    if packed.bits != BITS:
        problem = f"{packed.bits} bits: AWQ files have 4"
    elif packed.out_features % len(ORDER):
        problem = f"{packed.out_features} outputs: AWQ files need a multiple of {len(ORDER)}"
    elif not packed.has_half_scales:
        problem = "scales that float16 cannot hold: keep compressed-tensors"
    if problem is not None:
        raise DeploymentError(f"layer {name} has {problem}")
    return {
        f"{name}.qweight": _pack(packed.codes().t()),
        f"{name}.qzeros": _pack(zero_points(packed).t()),
        f"{name}.scales": packed.scales.t().to(torch.float16).contiguous(),
    }


def read_layer(tensors: Mapping[str, Tensor], name: str, layer: LayerFormat) -> PackedWeight:
    """The inverse of `layer_tensors`; the number format is that of the config."""
    qweight, scales = layer_parts(tensors, name, ("qweight", "scales"))
    num_outputs = scales.shape[1]
    if qweight.dtype != torch.int32 or qweight.shape[1] * len(ORDER) != num_outputs:
        found = f"qweight {tuple(qweight.shape)} of {qweight.dtype} and scales {tuple(scales.shape)}"
        raise CheckpointError(f"layer {name} has {found}: the version gemm has int32 words of {len(ORDER)} outputs")
    stored, zeros = tensors.get(f"{name}.qzeros"), None
    if stored is not None:
        zeros = _unpack(stored, num_outputs).t().contiguous()
    if layer.symmetric and zeros is not None and bool((zeros != 1 << BITS - 1).any()):
        raise CheckpointError(f"layer {name} has zero points, and its config says that there are none")
    if not layer.symmetric and zeros is None:
        raise CheckpointError(f"layer {name} has no qzeros: the files and their config do not fit")
    codes = _unpack(qweight, num_outputs).t().contiguous()
    size = codes.shape[1] // max(scales.shape[0], 1)
    if layer.group_size not in (0, size):
        raise CheckpointError(f"layer {name} has groups of {size}, and its config says {layer.group_size}")
    return PackedWeight.from_codes(codes, scales.t(), None if layer.symmetric else zeros, BITS)


def _pack(numbers: Tensor) -> Tensor:
    """`(rows, out)` to `(rows, out/8)` words."""
    return pack(numbers.unflatten(-1, (-1, len(ORDER)))[..., ORDER].flatten(-2), BITS)


def _unpack(words: Tensor, num_outputs: int) -> Tensor:
    codes = unpack(words.contiguous(), BITS, num_outputs)
    found: Tensor = codes.unflatten(-1, (-1, len(ORDER)))[..., _PLACES].flatten(-2)
    return found


def make_config(layers: Mapping[str, LayerFormat], ignored: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of a model. Zero points are always in the files, those of symmetric layers too."""
    formats = {*layers.values()}
    if len(formats) > 1 or any(layer.bits != BITS for layer in formats):
        found = ", ".join(sorted(f"{layer.bits} bits in groups of {layer.group_size}" for layer in formats))
        raise DeploymentError(
            f"layers of {found}: AWQ files have one format of {BITS} bits for all; keep compressed-tensors"
        )
    size = next((layer.group_size for layer in formats), 0)
    return {
        "quant_method": "awq",
        "version": "gemm",
        "bits": BITS,
        "group_size": size or -1,
        "zero_point": True,
        "modules_to_not_convert": list(ignored),
    }


def read_config(config: Mapping[str, Any], packed_names: Sequence[str]) -> dict[str, LayerFormat]:
    """The format of each packed layer by its name."""
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    bits = int(config.get("bits", config.get("w_bit", BITS)))
    if version != "gemm" or bits != BITS:
        raise CheckpointError(f"AWQ files of version {version!r}, {bits} bits: allowed: gemm, {BITS} bits")
    size = int(config.get("group_size", config.get("q_group_size", 128)))
    return dict.fromkeys(packed_names, LayerFormat(BITS, max(size, 0), not config.get("zero_point", True)))
