"""`recipe_for`: the number format in which a runtime stores exactly the requested bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsebit.errors import ConfigError
from sparsebit.llm.converting.genai_folder import need_architecture
from sparsebit.llm.gguf.file import need_writable
from sparsebit.llm.layers.float_kinds import FLOAT_KINDS, FloatKind
from sparsebit.llm.models.hub_classes import load_config
from sparsebit.llm.recipe import BITS, Recipe


@dataclass(frozen=True)
class Target:
    """The number formats of a runtime. `zero_points`: the bits with zero points. `groups`: the first is usual.

    `stores`: the same as text. `format`: of `convert`, for the file that the runtime reads; None, if it reads the
    folder of `quantize`.
    """

    bits: tuple[int, ...]
    zero_points: tuple[int, ...]
    groups: tuple[int, ...]
    floats: tuple[FloatKind, ...]
    stores: str
    format: str | None = None


TARGETS: Mapping[str, Target] = {
    "llama.cpp": Target(
        (4, 8), (), (32,), (), "4 bits (Q4_0) or 8 (Q8_0) without zero points, in groups of 32", "gguf"
    ),
    "vllm": Target(
        (4, 8),
        (4,),
        (128, 64, 32, 0),
        FLOAT_KINDS,
        "4 bits, or 8 without zero points, in groups of 128, 64, 32 or a row (0), and fp8, mxfp4, nvfp4",
    ),
    "transformers": Target(BITS, BITS, (), FLOAT_KINDS, "2, 3, 4 or 8 bits, and fp8, mxfp4, nvfp4"),
    "genai": Target(
        (2, 4, 8),
        (2, 4, 8),
        (128, 64, 32, 16, 256, 512, 1024),
        (),
        "2, 4 or 8 bits in groups of a power of two from 16 on",
        "onnx-genai",
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
    Recipe(**given)  # raises for fields that are wrong for every target
    row = TARGETS[target]
    method = given.get("method", Recipe.method)
    if method in FLOAT_KINDS:
        if method not in row.floats:
            raise _conflict(target, f"method={method!r}", "use gptq, awq, autoround or rtn")
        return Recipe(**given)
    bits = tuple(given.get("candidate_bits") or (given.get("bits", Recipe.bits),))
    more = [number for number in bits if number not in row.bits]
    if more:
        stored = [number for number in row.bits if number > more[0]]
        grows = f"it would store them in {min(stored)}; " if stored else ""
        raise _conflict(target, f"{more[0]} bits", f"{grows}ask for {' or '.join(map(str, row.bits))} (--bits)")
    is_symmetric_only = any(number not in row.zero_points for number in bits)
    if is_symmetric_only and given.get("symmetric") is False:
        raise _conflict(target, "symmetric=False", "leave it out, or set it to True")
    group_size = given.get("group_size")
    if row.groups and group_size is not None and group_size not in row.groups:
        raise _conflict(target, f"group_size={group_size}", "leave it out (--group-size)")
    chosen = {"group_size": row.groups[0]} if row.groups else {}
    return Recipe(**{**chosen, **({"symmetric": True} if is_symmetric_only else {}), **given})


def need_model(target: str, folder: Path, *, trust_remote_code: bool = False) -> None:
    """Raise for a model that cannot be converted for the target, before hours of work."""
    file_format = TARGETS[target].format
    if file_format is None:
        return
    config = load_config(folder, trust_remote_code=trust_remote_code)
    if file_format == "gguf":
        need_writable(folder, config)
    else:
        need_architecture(config)


def _conflict(target: str, given: str, advice: str) -> ConfigError:
    return ConfigError(f"{given} for {target}: it stores {TARGETS[target].stores}; {advice}")
