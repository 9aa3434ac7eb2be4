"""`warn_of_growth`: warns if a GGUF file stores weights in more bits than were requested."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping

from sparsebit.llm.checkpoint.layer_format import LayerFormat
from sparsebit.llm.gguf.blocks import BYTES
from sparsebit.llm.gguf.k_quant_blocks import SUPER_BLOCK
from sparsebit.llm.gguf.mixes import SMALL_BLOCKS
from sparsebit.llm.gguf.tensors import GgufTensor

log = logging.getLogger(__name__)
_CODE_BITS = {"Q4_0": 4, "Q5_0": 5, "Q8_0": 8, "Q4_K": 4, "Q6_K": 6}


def warn_of_growth(tensors: Iterable[GgufTensor], formats: Mapping[str, LayerFormat]) -> None:
    """`formats`: of the packed layers that the file was made from. Types that were requested by name do not count."""
    exact: Counter[tuple[LayerFormat, str]] = Counter()
    replaced: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.is_rounded:
            replaced[tensor.kind] += tensor.kind in SMALL_BLOCKS.values()
            continue
        for parameter in tensor.parameters:
            layer = formats.get(parameter.removesuffix(".weight"))
            if layer is not None and _CODE_BITS[tensor.kind] > layer.bits:
                exact[layer, tensor.kind] += 1
    for (layer, kind), count in exact.items():
        zero_points = "" if layer.symmetric else " with zero points"
        log.warning(
            "%d layers of %d bits%s are stored as %s, %.1f bits a weight: no smaller GGUF type holds them without "
            "rounding; quantize with --for llama.cpp (4 bits become Q4_0, %.1f bits a weight), or round to a smaller "
            "type (--gguf-type Q4_K)",
            *(count, layer.bits, zero_points, kind, _bits_of(kind), _bits_of("Q4_0")),
        )
    for wanted, kind in SMALL_BLOCKS.items():
        if replaced[kind]:
            log.warning(
                "%d tensors are stored as %s, %.1f bits a weight, instead of %s, %.1f bits: their rows are not a "
                "multiple of %d columns",
                *(replaced[kind], kind, _bits_of(kind), wanted, _bits_of(wanted), SUPER_BLOCK),
            )


def _bits_of(kind: str) -> float:
    weights, size = BYTES[kind]
    return 8 * size / weights
