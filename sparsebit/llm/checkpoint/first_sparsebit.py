"""Checkpoints of the first Sparsebit's LLaMA quantization: pack32, and pack8 of its QLoRA.

A pickle with `model`, the tensors by name. A layer `NAME` has, along the inputs and with the lowest bits
first:

| | pack32 | pack8 |
|---|---|---|
| `NAME.qweight` | int32 `(in * bits / 32, out)`, 2, 3 or 4 bits | int8 `(in * bits / 8, out)`: bytes of the words |
| `NAME.scales` | `(out, 1)` or `(out, groups, 1)` | the same |
| `NAME.zeros` | zero point times scale, as a float | the same |
| `NAME.bias` | zeros, where the layer has none | the same |

The files use names of an early LLaMA in transformers, which are translated. The pickle is read without running code.
"""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsebit.errors import CheckpointError
from sparsebit.llm.layers.packed_weight import PackedWeight
from sparsebit.numerics.packing import WORD

_RENAMED = (
    ("model.decoder.", "model."),
    (".feed_forward.w1.", ".mlp.gate_proj."),
    (".feed_forward.w2.", ".mlp.down_proj."),
    (".feed_forward.w3.", ".mlp.up_proj."),
    (".attention_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
)
_BITS = (2, 3, 4)
_MOST_OFF = 0.02  # largest distance of a zero point from a whole number


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """The tensors of the file by the names of today's transformers; weights are mapped into memory, not read."""
    try:
        # pack32 of early versions holds the arguments of the command.
        with torch.serialization.safe_globals([argparse.Namespace]):
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{path} cannot be read without running code ({first})") from None
    tensors: Any = found.get("model") if isinstance(found, dict) else None
    if not isinstance(tensors, dict) or not any(str(name).endswith(".qweight") for name in tensors):
        raise CheckpointError(
            f"{path} is not a checkpoint of the first Sparsebit (pack32 or pack8): it has no packed layers in 'model'"
        )
    return {_today(str(name)): value for name, value in tensors.items() if isinstance(value, Tensor)}


def read_layer(tensors: Mapping[str, Tensor], name: str, in_features: int, path: Path) -> PackedWeight:
    """One layer; `in_features` is that of the architecture."""
    missing = [suffix for suffix in ("qweight", "scales", "zeros") if f"{name}.{suffix}" not in tensors]
    if missing:
        raise CheckpointError(f"{path}: layer {name} has no {', '.join(missing)}")
    words = _words(tensors[f"{name}.qweight"], name, path)
    bits, rest = divmod(words.shape[1] * WORD, in_features)
    scales, products = (tensors[f"{name}.{suffix}"].flatten(1).float() for suffix in ("scales", "zeros"))
    if rest or bits not in _BITS or scales.shape != products.shape or in_features % scales.shape[1]:
        raise CheckpointError(
            f"{path}: layer {name} has codes {tuple(tensors[f'{name}.qweight'].shape)} and scales "
            f"{tuple(tensors[f'{name}.scales'].shape)}: these are not those of {in_features} inputs in 2, 3 or 4 bits"
        )
    wanted = products / scales
    zeros = wanted.round()
    is_whole = bool(((wanted - zeros).abs() <= _MOST_OFF).all())
    if not is_whole or not bool(((zeros >= 0) & (zeros < 1 << bits) & (scales > 0)).all()):
        raise CheckpointError(
            f"{path}: layer {name} has zero points that are not whole numbers from 0 to {(1 << bits) - 1}, or scales "
            "that are not positive"
        )
    size = in_features // scales.shape[1]
    return PackedWeight(words.contiguous(), scales.contiguous(), zeros.to(torch.uint8), bits, size, in_features)


def _words(qweight: Tensor, name: str, path: Path) -> Tensor:
    """The words of each row of the layer's weight, `(out, words)` int32."""
    if qweight.dtype == torch.int32:
        return qweight.t()
    if qweight.dtype != torch.int8 or qweight.shape[0] % 4:
        raise CheckpointError(
            f"{path}: layer {name} has codes of type {qweight.dtype} and shape {tuple(qweight.shape)}: pack32 has "
            "int32, pack8 int8, four rows for a word"
        )
    return qweight.t().contiguous().view(torch.int32)


def _today(name: str) -> str:
    for old, new in _RENAMED:
        name = name.replace(old, new)
    return name
