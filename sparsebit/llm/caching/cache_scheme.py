"""The number format of the cache in a model folder: its entry in `config.json`, and the scales in the files.

Calibrated kinds have the entry `kv_cache_scheme` of compressed-tensors, which vLLM and transformers read, and two
tensors for each attention layer: `NAME.k_scale` and `NAME.v_scale`, `(heads, 1, 1)` or `(1,)`. int4 needs no scales,
and no server reads it: its entry is `sparsebit_kv_cache`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from sparsebit.errors import CheckpointError, ConfigError
from sparsebit.llm.caching.cache_kinds import CACHE_KINDS, CALIBRATED, LARGEST, CacheKind
from sparsebit.llm.caching.packed_cache import LayerCodes
from sparsebit.llm.caching.row_codes import BLOCK, RowCodes
from sparsebit.llm.models.skeleton import Skeleton

log = logging.getLogger(__name__)
_OWN = "sparsebit_kv_cache"
_INT4 = {"num_bits": 4, "block_size": BLOCK, "levels": "iq4_nl", "transform": "hadamard"}
_SCALE = re.compile(r"(?:.*\.)?(\d+)\..*?([kv])_scale")
_FLOAT, _OF_FOLDER = "float", "folder"
CHOICES = (_OF_FOLDER, _FLOAT, *CACHE_KINDS)


def with_cache(config: Mapping[str, Any], kind: CacheKind, *, per_head: bool) -> dict[str, Any]:
    """A model's config with the entry of this kind of cache."""
    if kind == "int4":
        return {**config, _OWN: _INT4}
    scheme = {"num_bits": 8, "type": "int" if kind == "int8" else "float", "symmetric": True, "dynamic": False}
    scheme |= {"strategy": "attn_head" if per_head else "tensor", "observer": "minmax"}
    return {**config, "quantization_config": {**config["quantization_config"], "kv_cache_scheme": scheme}}


def cache_kind(config: Mapping[str, Any]) -> CacheKind | None:
    """The kind of the cache in a model's config; None if it is float, or of a kind that is not read, with a warning."""
    own, scheme = config.get(_OWN), (config.get("quantization_config") or {}).get("kv_cache_scheme")
    if own is not None:
        if own != _INT4:
            raise CheckpointError(f"{_OWN} in config.json is {own}: this version reads {_INT4}")
        return "int4"
    if not scheme:
        return None
    is_known = scheme.get("num_bits") == 8 and scheme.get("symmetric", True) and not scheme.get("dynamic")
    if not is_known or scheme.get("strategy", "tensor") not in ("tensor", "attn_head"):
        log.warning("kv_cache_scheme %s: only constant scales of 8 bits are read; the cache stays float", scheme)
        return None
    return "int8" if scheme.get("type", "int") == "int" else "fp8"


def scale_names(names: Iterable[str]) -> dict[tuple[int, str], str]:
    """The tensors of a folder with scales of the cache, by the number of the layer and `k` or `v`."""
    found = ((_SCALE.fullmatch(name), name) for name in names if name.endswith((".k_scale", ".v_scale")))
    return {(int(match[1]), match[2]): name for match, name in found if match is not None}


def cache_codes(skeleton: Skeleton, wanted: str) -> dict[int, LayerCodes]:
    """How each layer of a folder's model is packed; empty for a float cache. `wanted`: one of `CHOICES`."""
    if wanted not in CHOICES:
        raise ConfigError(f"kv_cache={wanted!r}: allowed: {', '.join(CHOICES)}")
    folder, stored = skeleton.folder, cache_kind(skeleton.folder.config)
    kind = stored if wanted == _OF_FOLDER else next((kind for kind in CACHE_KINDS if kind == wanted), None)
    if kind is None:
        return {}
    config = skeleton.model.config.get_text_config(decoder=True)
    numbers = range(int(config.num_hidden_layers))
    if kind not in CALIBRATED:
        return dict.fromkeys(numbers, LayerCodes(RowCodes(kind), RowCodes(kind)))
    names = scale_names(folder)
    if wanted == _OF_FOLDER and not names:
        text = (
            "%s: the cache of keys and values stays float: config.json asks for %s, and the files have no scales for it"
        )
        log.warning(text, folder.path, kind)
        return {}
    if stored not in CALIBRATED or not names:
        advice = "quantize it with --kv-cache int8 or fp8, or use int4, which needs no calibration"
        raise ConfigError(f"{folder.path} has no calibrated scales for a cache of kind {kind}: {advice}")
    factor = LARGEST[stored] / LARGEST[kind]  # the largest calibrated value is the same
    found: dict[int, LayerCodes] = {}
    for number in sorted({number for number, _ in names}):
        keys, values = (_scale(skeleton, names, number, which, config) * factor for which in "kv")
        found[number] = LayerCodes(RowCodes(kind, keys), RowCodes(kind, values))
    return found


def _scale(skeleton: Skeleton, names: Mapping[tuple[int, str], str], number: int, which: str, config: Any) -> Tensor:
    folder = skeleton.folder
    if (number, which) not in names:
        raise CheckpointError(f"{folder.path} has no {which}_scale of layer {number}, and its config.json asks for one")
    scale = folder.tensor(names[number, which]).float()
    heads = {1, config.num_attention_heads, getattr(config, "num_key_value_heads", None) or 1}
    if scale.numel() not in heads or not bool((scale.isfinite() & (scale > 0)).all()):
        given = f"{names[number, which]} of the shape {tuple(scale.shape)}"
        raise CheckpointError(
            f"{folder.path}: {given}: allowed: {' or '.join(map(str, sorted(heads)))} finite scales above 0"
        )
    return scale.reshape(-1, 1, 1)
