"""Which packed layers vLLM runs; `quantize` and `convert` report the others.

As of vLLM 0.32 on NVIDIA GPUs with its own packages: `tests/llm/test_vllm.py` runs folders in vLLM for CPUs,
which has fewer kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparsebit.llm.checkpoint.layer_format import LayerFormat

COMPRESSED_TENSORS, GPTQ = "compressed-tensors", "gptq"
# Bits, and whether without zero points.
_INTEGERS = {COMPRESSED_TENSORS: ((4, True), (4, False), (8, True)), GPTQ: ((4, True), (8, True))}
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
    sizes = sorted({layer.group_size for layer in integers.values()} - {*_GROUPS})
    if sizes:
        reasons.append(f"groups of {', '.join(map(str, sizes))}: it has 32, 64, 128, or one scale per row")
    groups = [group for group in fused if any(name in integers for name in group)]
    mixed = [group for group in groups if len({integers.get(name) for name in group}) > 1]
    return (*reasons, *(f"{', '.join(group)} are one matrix there and need one number format" for group in mixed))


def _said(bits: int, symmetric: bool) -> str:
    return f"{bits} bits" if symmetric else f"{bits} bits with zero points"
