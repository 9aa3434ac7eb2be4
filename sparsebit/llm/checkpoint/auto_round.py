"""The config of AutoRound's folders: layers in the layout of GPTQ or AWQ files, with exceptions by name.

`packing_format` says the layout: `auto_round:auto_gptq` is GPTQ's version 1, `auto_round` and `auto_round:gptqmodel`
are its version 2, `auto_round:auto_awq` is AWQ's. `extra_config` has other bits or groups for some layers, by name or
pattern; layers without packed weights are float. Folders that it writes for llm-compressor are read as folders of
compressed-tensors.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from sparsebit.errors import CheckpointError
from sparsebit.llm.checkpoint import awq, gptq
from sparsebit.llm.checkpoint.layer_format import LayerFormat
from sparsebit.llm.layers.packed_weight import PackedWeight

METHODS = ("auto-round", "auto_round", "intel/auto-round")
Reader = Callable[[Mapping[str, Tensor], str, LayerFormat], PackedWeight]
_LAYOUTS: dict[str, tuple[tuple[str, ...], Reader]] = {
    "auto_round:auto_gptq": (gptq.SUFFIXES, functools.partial(gptq.read_layer, version=1)),
    "auto_round": (gptq.SUFFIXES, functools.partial(gptq.read_layer, version=2)),
    "auto_round:gptqmodel": (gptq.SUFFIXES, functools.partial(gptq.read_layer, version=2)),
    "auto_round:auto_awq": (awq.SUFFIXES, awq.read_layer),
}
_USUAL = "auto_round:auto_gptq"
_PATTERN = re.compile(r"[\\^$*+?|\[\]()]")  # in names there is none of these


def read_config(
    config: Mapping[str, Any], packed_names: list[str]
) -> tuple[dict[str, LayerFormat], tuple[str, ...], Reader]:
    """The format of each packed layer by its name, the endings of their tensors, and what reads a layer."""
    layout = str(config.get("packing_format") or _USUAL)
    kind, rounded = config.get("data_type", "int"), int(config.get("act_bits") or 16)
    if layout not in _LAYOUTS or kind != "int" or rounded < 16:
        given = f"{layout!r} with {kind} weights and activations of {rounded} bits"
        allowed = f"{', '.join(_LAYOUTS)}, with int weights and float activations"
        raise CheckpointError(f"AutoRound files in {given}: allowed: {allowed}")
    found: dict[str, LayerFormat] = {}
    for name in packed_names:
        entry = {**config, **_exception(config.get("extra_config") or {}, name)}
        found[name] = LayerFormat(int(entry["bits"]), max(int(entry["group_size"]), 0), bool(entry.get("sym", True)))
    return found, *_LAYOUTS[layout]


def _exception(entries: Mapping[str, Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """The entry of a layer: its own, else that of the first pattern that is found in its name."""
    patterns = (key for key in entries if _PATTERN.search(key))
    first = name if name in entries else next((key for key in patterns if re.search(key, name)), None)
    return {} if first is None else entries[first]
