"""Which kernel of a CPU multiplies packed 4-bit weights fastest: the allowed ones are tried once, the fastest is used.

Some of torch's kernels are fast on one processor and a slow fallback on another, under the same name.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
from sparsebit.llm.layers.packed_weight import PackedWeight, packed_linear

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
    seconds: dict[str, float]
    difference: dict[str, float]
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return UNPACKED if self.layout is None else self.layout.name


def probe_cpu(activations: str = "float32") -> CpuProbe:
    """Try the kernels that keep activations at least as exact as `activations`; measured once for each thread count."""
    return _probe(as_activations(activations), torch.get_num_threads())


@cache
@torch.no_grad()
def _probe(activations: Activations, num_threads: int) -> CpuProbe:
    if activations == "float32":  # no choice
        return CpuProbe(None, {}, {})
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (_SIZE, _SIZE), generator=generator)
    scales = torch.rand(_SIZE, _SIZE // _GROUP, generator=generator).add_(0.5).half()
    packed = PackedWeight.from_codes(codes, scales, torch.randint(0, 16, scales.shape, generator=generator), 4)
    x = torch.randn(1, _SIZE, generator=generator)
    found = CpuProbe(None, {}, {}, {})
    _measure(found, UNPACKED, lambda: packed_linear(x, packed), x @ packed.dequantize(torch.float32).t())
    for layout in (INT4PACK, DYNAMIC):
        if ACTIVATIONS.index(layout.activations) <= ACTIVATIONS.index(activations):
            reason = _refusal(found, layout, packed, x)
            if reason is not None:
                found = replace(found, refused={**found.refused, layout.name: reason})
            elif found.seconds[layout.name] < found.seconds[found.name]:
                found = replace(found, layout=layout)
    return found


def _measure(probe: CpuProbe, name: str, product: Callable[[], Tensor], expected: Tensor) -> None:
    probe.difference[name] = float((product() - expected).norm() / expected.norm())
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        product()
        times.append(time.perf_counter() - started)
    probe.seconds[name] = min(times)


def _refusal(probe: CpuProbe, layout: KernelLayout, packed: PackedWeight, x: Tensor) -> str | None:
    """Why the kernel is not used; its time and its difference are noted, if it runs."""
    reason = layout.refusal(packed, x.dtype)
    if reason is not None:
        return reason
    try:
        weight = layout.prepare(packed, x.dtype)
        _measure(probe, layout.name, lambda: layout.product(x, weight), x @ packed.dequantize(torch.float32).t())
    except RuntimeError as error:  # raised for an operator that this processor or this build of torch lacks
        return str(error).splitlines()[0]
    if not probe.difference[layout.name] <= _MOST_DIFFERENCE:
        return f"its product is {probe.difference[layout.name]:.2g} off"
    if weight.words.nbytes > 1.5 * packed.qweight.nbytes:
        return f"it keeps {8 * weight.words.nbytes / packed.qweight.nbytes / 2:.0f} bits of a 4-bit weight"
    return None
