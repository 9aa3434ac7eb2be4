"""`recipe_for`: the number format in which a runtime stores exactly the requested bits; `vllm_reasons`: what vLLM runs.

As of vLLM 0.32 on NVIDIA GPUs with its own packages: `tests/llm/test_vllm.py` runs folders in vLLM for CPUs, which has
fewer kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsebit.errors import ConfigError
from sparsebit.llm.caching.cache_kinds import CACHE_KINDS, CacheKind
from sparsebit.llm.checkpoint.layer_format import LayerFormat
from sparsebit.llm.converting.genai_folder import need_architecture
from sparsebit.llm.gguf.file import need_writable
from sparsebit.llm.layers.float_kinds import FLOAT_KINDS, FloatKind
from sparsebit.llm.models.hub_classes import load_config
from sparsebit.llm.recipe import BITS, Recipe


@dataclass(frozen=True)
class Target:
    """The number formats of a runtime. `zero_points`: the bits with zero points. `groups`: the first is usual.

    `stores`: the same as text. `format`: of `convert`, for the file that the runtime reads; None, if it reads the
    folder of `quantize`. `caches`: the kinds of caches, besides float.
    """

    bits: tuple[int, ...]
    zero_points: tuple[int, ...]
    groups: tuple[int, ...]
    floats: tuple[FloatKind, ...]
    stores: str
    format: str | None = None
    caches: tuple[CacheKind, ...] = ()


TARGETS: Mapping[str, Target] = {
    "llama.cpp": Target(
        (4, 8), (), (32,), (), "4 bits (Q4_0) or 8 (Q8_0) without zero points, in groups of 32", "gguf"
    ),
    "vllm": Target(
        *((4, 8), (4,), (128, 64, 32, 0), FLOAT_KINDS),
        "4 bits, or 8 without zero points, in groups of 128, 64, 32 or a row (0), and fp8, mxfp4, nvfp4",
        caches=("fp8",),
    ),
    "transformers": Target(
        *(BITS, BITS, (), FLOAT_KINDS), "2, 3, 4 or 8 bits, and fp8, mxfp4, nvfp4", caches=CACHE_KINDS
    ),
    "genai": Target(
        *((2, 4, 8), (2, 4, 8), (128, 64, 32, 16, 256, 512, 1024), ()),
        *("2, 4 or 8 bits in groups of a power of two from 16 on", "onnx-genai"),
    ),
}


def recipe_for(target: str, **given: Any) -> Recipe:
    """A recipe whose numbers the runtime `target` stores without a change; `given`: fixed fields of `Recipe`.

    Bits that the runtime would store in more bits, and groups or zero points that it does not support, are errors.

    >>> recipe_for("llama.cpp", bits=4).symmetric, recipe_for("llama.cpp").group_size
    (True, 32)
    """
    if target not in TARGETS:
        raise ConfigError(f"target {target!r}: allowed: {', '.join(TARGETS)}")
    given = _with_inputs(given)
    Recipe(**given)  # raises for fields that are wrong for every target
    row = TARGETS[target]
    if row.format is not None and given.get("activations") not in (None, "float"):
        reason = "its file holds weights alone, and it rounds inputs as it likes; leave them out (--activations)"
        raise ConfigError(f"activations={given['activations']!r} for {target}: {reason}")
    method, group_size = given.get("method", Recipe.method), given.get("group_size")
    bits = tuple(given.get("candidate_bits") or (given.get("bits", Recipe.bits),))
    more = [number for number in bits if number not in row.bits]
    is_symmetric_only = any(number not in row.zero_points for number in bits)
    conflict = None
    if method in FLOAT_KINDS:
        conflict = (
            None if method in row.floats else (f"method={method!r}", "use gptq, awq, autoround, efficientqat or rtn")
        )
    elif more:
        stored = [number for number in row.bits if number > more[0]]
        grows = f"it would store them in {min(stored)}; " if stored else ""
        conflict = f"{more[0]} bits", f"{grows}ask for {' or '.join(map(str, row.bits))} (--bits)"
    elif is_symmetric_only and given.get("symmetric") is False:
        conflict = "symmetric=False", "leave it out, or set it to True"
    elif row.groups and group_size is not None and group_size not in row.groups:
        conflict = f"group_size={group_size}", "leave it out (--group-size)"
    if conflict is not None:
        raise ConfigError(f"{conflict[0]} for {target}: it stores {row.stores}; {conflict[1]}")
    kind = given.get("kv_cache", "float")
    if kind not in ("float", *row.caches):
        allowed = " or ".join(("float", *row.caches))
        raise ConfigError(f"kv_cache={kind!r} for {target}: it reads the scales of a cache of kind: {allowed}")
    if target == "vllm" and kind == "fp8":  # scales of heads are read by one of its attention kernels only
        given = {"kv_scales": "layer", **given}
    if method in FLOAT_KINDS:
        return Recipe(**given)
    chosen = {"group_size": row.groups[0]} if row.groups else {}
    return Recipe(**{**chosen, **({"symmetric": True} if is_symmetric_only else {}), **given})


def _with_inputs(given: dict[str, Any]) -> dict[str, Any]:
    """With the weights that rounded inputs need, unless others are given: no zero points, 8 bits per row."""
    is_plain = given.get("activations") in (None, "float") or given.get("method") in FLOAT_KINDS
    usual: dict[str, Any] = {"symmetric": True} | ({"group_size": 0} if given.get("bits") == 8 else {})
    return given if is_plain else {**usual, **given}


def need_model(target: str, folder: Path, *, trust_remote_code: bool = False) -> None:
    """Raise for a model that cannot be converted for the target, before hours of work."""
    file_format = TARGETS[target].format
    if file_format is not None:
        config = load_config(folder, trust_remote_code=trust_remote_code)
        need_writable(folder, config) if file_format == "gguf" else need_architecture(config)


COMPRESSED_TENSORS, GPTQ, AWQ = "compressed-tensors", "gptq", "awq"
# Bits, and whether without zero points.
_INTEGERS = {
    COMPRESSED_TENSORS: ((4, True), (4, False), (8, True)),
    GPTQ: ((4, True), (8, True)),
    AWQ: ((4, True), (4, False)),
}
_GROUPS = (0, 32, 64, 128)


def vllm_reasons(
    formats: Mapping[str, LayerFormat], fused: Sequence[Sequence[str]], method: str = COMPRESSED_TENSORS
) -> tuple[str, ...]:
    """Why vLLM would refuse the layers: number formats without a kernel, and fused layers of different formats."""
    integers = {name: layer for name, layer in formats.items() if layer.kind == "int"}
    kinds = sorted({(layer.bits, layer.symmetric) for layer in integers.values()} - {*_INTEGERS[method]})
    reasons = []
    if kinds:
        known = ", ".join(_said(*kind) for kind in _INTEGERS[method])
        reasons.append(f"{', '.join(_said(*kind) for kind in kinds)}: of {method} files its own kernels have {known}")
    rounded = {layer for layer in integers.values() if layer.bits == 4 and layer.inputs is not None}
    if any(layer.inputs is not None and not layer.inputs.dynamic for layer in rounded):
        reasons.append("4 bits with constant scales of inputs: its kernels for 4 bits take a scale for each token")
    if any(layer.is_dense for layer in rounded):
        reasons.append("4 bits with int8 inputs: its kernel for them is for Arm CPUs")
    if any(not layer.is_dense and layer.group_size != 128 for layer in rounded):
        reasons.append("4 bits with fp8 inputs: its kernel for them takes groups of 128")
    sizes = sorted({layer.group_size for layer in integers.values()} - {*_GROUPS})
    if sizes:
        reasons.append(f"groups of {', '.join(map(str, sizes))}: it has 32, 64, 128, or one scale per row")
    groups = [group for group in fused if any(name in integers for name in group)]
    mixed = [group for group in groups if len({integers.get(name) for name in group}) > 1]
    return (*reasons, *(f"{', '.join(group)} are one matrix there and need one number format" for group in mixed))


def cache_reasons(kind: str) -> tuple[str, ...]:
    """Why vLLM would not compute with a cache of this kind."""
    why = {
        "int8": "a cache of int8: it would round keys and values to fp8 with these scales",
        "int4": "a cache of 4 bits: it would keep keys and values in float",
    }
    return (why[kind],) if kind in why else ()


def _said(bits: int, symmetric: bool) -> str:
    return f"{bits} bits{'' if symmetric else ' with zero points'}"
