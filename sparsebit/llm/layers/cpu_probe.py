"""Which kernel of a CPU multiplies packed 4-bit weights fastest: the allowed ones are tried once, the fastest is used.

Some of torch's kernels are fast on one processor and a slow fallback on another, under the same name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from sparsebit.llm.layers.kernel_layouts import (
    ACTIVATIONS,
    DYNAMIC,
    INT4PACK,
    Activations,
    KernelLayout,
    as_activations,
)
from sparsebit.llm.layers.packed_weight import PackedWeight
from sparsebit.llm.layers.unpacked_product import packed_linear

UNPACKED = "unpacked"
_SIZE, _GROUP, _REPEATS = 1024, 128, 5
# A kernel whose product is further off than this is wrong; int8 activations are about 0.01 off.
_MOST_DIFFERENCE = 0.03


@dataclass(frozen=True)
class CpuProbe:
    """`layout`: the fastest of the allowed kernels; None is `unpacked`, in float32.

    `seconds`: of a product of one row with 1024 x 1024 weights, by kernel. `difference`: of each kernel's product from
    that of the dequantized weight, relative to its size. `refused`: why a kernel was not tried or not chosen.
    """

    layout: KernelLayout | None
    seconds: Mapping[str, float]
    difference: Mapping[str, float]
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return UNPACKED if self.layout is None else self.layout.name


def probe_cpu(activations: str = "float32") -> CpuProbe:
    """Try the kernels that keep activations at least as exact as `activations`; measured once for each thread count."""
    return _probe(as_activations(activations), torch.get_num_threads())


@cache
@torch.no_grad()
def _probe(activations: Activations, num_threads: int) -> CpuProbe:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (_SIZE, _SIZE), generator=generator)
    scales = torch.rand(_SIZE, _SIZE // _GROUP, generator=generator).add_(0.5).half()
    packed = PackedWeight.from_codes(codes, scales, torch.randint(0, 16, scales.shape, generator=generator), 4)
    x = torch.randn(1, _SIZE, generator=generator)
    expected = x @ packed.dequantize(torch.float32).t()
    seconds: dict[str, float] = {}
    difference: dict[str, float] = {}
    refused: dict[str, str] = {}
    chosen: KernelLayout | None = None
    if activations == "float32":  # no choice
        return CpuProbe(None, seconds, difference, refused)
    seconds[UNPACKED] = _seconds(lambda: packed_linear(x, packed))
    difference[UNPACKED] = _difference(packed_linear(x, packed), expected)
    for layout in (INT4PACK, DYNAMIC):
        if ACTIVATIONS.index(layout.activations) > ACTIVATIONS.index(activations):
            continue
        reason = _try(layout, packed, x, expected, seconds, difference)
        if reason is not None:
            refused[layout.name] = reason
        elif seconds[layout.name] < min(seconds[UNPACKED], seconds[chosen.name] if chosen else float("inf")):
            chosen = layout
    return CpuProbe(chosen, seconds, difference, refused)


def _try(
    layout: KernelLayout,
    packed: PackedWeight,
    x: Tensor,
    expected: Tensor,
    seconds: dict[str, float],
    difference: dict[str, float],
) -> str | None:
    reason = layout.refusal(packed, x.dtype)
    if reason is not None:
        return reason
    try:
        weight = layout.prepare(packed, x.dtype)
        difference[layout.name] = _difference(layout.product(x, weight), expected)
        seconds[layout.name] = _seconds(lambda: layout.product(x, weight))
    except RuntimeError as error:  # raised for an operator that this processor or this build of torch lacks
        return str(error).splitlines()[0]
    if not difference[layout.name] <= _MOST_DIFFERENCE:
        return f"its product is {difference[layout.name]:.2g} off"
    if weight.words.nbytes > 1.5 * packed.qweight.nbytes:
        return f"it keeps {8 * weight.words.nbytes / packed.qweight.nbytes / 2:.0f} bits of a 4-bit weight"
    return None


def _seconds(call: Callable[[], Tensor]) -> float:
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def _difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
