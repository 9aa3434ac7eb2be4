"""Checkpoints of the first Sparsebit's LLaMA quantization: pack32, and pack8 of its QLoRA.

A pickle with `model`, the tensors by name. A layer `NAME` has, along the inputs and with the lowest bits first:

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
import functools
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsebit.errors import CheckpointError
from sparsebit.llm.checkpoint.layer_format import layer_parts
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
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path} cannot be read without running code ({first})") from None
    tensors: Any = found.get("model") if isinstance(found, dict) else None
    if not isinstance(tensors, dict) or not any(str(name).endswith(".qweight") for name in tensors):
        raise CheckpointError(f"{path} is not a checkpoint of the first Sparsebit: it has no packed layers in 'model'")
    today = functools.partial(functools.reduce, lambda found, names: found.replace(*names), _RENAMED)
    return {today(str(name)): value for name, value in tensors.items() if isinstance(value, Tensor)}


def read_layer(tensors: Mapping[str, Tensor], name: str, in_features: int, path: Path) -> PackedWeight:
    """One layer; `in_features` is that of the architecture."""
    qweight, scales, zeros = layer_parts(tensors, name, ("qweight", "scales", "zeros"))
    is_words = qweight.dtype == torch.int32
    given = f"codes {tuple(qweight.shape)} of {qweight.dtype}, scales {tuple(scales.shape)}"
    words = qweight.t() if is_words else qweight.t().contiguous()
    if not is_words and (qweight.dtype != torch.int8 or qweight.shape[0] % 4):
        raise CheckpointError(f"{path}: layer {name} has {given}: pack32 has int32, pack8 int8, four rows for a word")
    words = words.view(torch.int32)
    bits, rest = divmod(words.shape[1] * WORD, in_features)
    scales, products = scales.flatten(1).float(), zeros.flatten(1).float()
    problem, top = None, (1 << bits) - 1
    if rest or bits not in _BITS or scales.shape != products.shape or in_features % scales.shape[1]:
        problem = f"{given}: these are not those of {in_features} inputs in 2, 3 or 4 bits"
    else:
        zeros = (products / scales).round()
        is_whole = (products / scales - zeros).abs() <= _MOST_OFF
        if not bool((is_whole & (zeros >= 0) & (zeros <= top) & (scales > 0)).all()):
            problem = f"zero points that are not whole numbers from 0 to {top}, or scales that are not positive"
    if problem is not None:
        raise CheckpointError(f"{path}: layer {name} has {problem}")
    size = in_features // scales.shape[1]
    return PackedWeight(words.contiguous(), scales.contiguous(), zeros.to(torch.uint8), bits, size, in_features)
