"""fake_quantize: the only door to fake-quant for the rest of the house, and the slot where a device's kernels go in.

A GPU's are in it from the start (`triton_kernels`), compiled at first use; without triton plain torch runs.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from torch import Tensor

from sparsebit.numerics import float8, operator
from sparsebit.numerics.gradients import Gradient
from sparsebit.numerics.operator import KERNELS, PLAIN, Kernels
from sparsebit.numerics.spec import TensorSpec

log = logging.getLogger(__name__)

__all__ = ["PLAIN", "Kernels", "fake_quantize", "register_kernels"]


def fake_quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor, spec: TensorSpec, *, gradient: Gradient = "ste", tag: str = ""
) -> Tensor:
    """The nearest value to each of `x` on the grid of `scale`, `zero_point` and `spec`, in the form and type of `x`.

    `gradient`: "ste" (x only), "lsq" or "pact" (scale and zero point too, where they require it); "relu_ste" and
    "relu_lsq" for a grid that begins at zero and so is a ReLU too. The magnitude of a scale counts, not its sign.
    `tag`: the name of the site, which export and errors show.
    """
    granularity = spec.granularity
    if spec.format == "float8":
        return float8.fake_quantize(x, scale, granularity.axis, tag)
    return operator.fake_quantize(
        x, scale, zero_point, granularity.axis, granularity.size, spec.qmin, spec.qmax, gradient, tag
    )


def register_kernels(device_type: str, kernels: Kernels | None) -> None:
    """Puts one device's kernels behind the operator, or takes them out again (None): then plain torch runs.

    Kernels take and give what `plain.fake_quantize` and `gradients.backward` do, and hand on to `PLAIN` what they lack.
    A compiler belongs inside them, at first use, never at import:

    >>> def forward(x, *rest):
    ...     from my_kernels import fake_quantize
    ...
    ...     return fake_quantize(x, *rest) if x.is_contiguous() else PLAIN.forward(x, *rest)
    >>> register_kernels("cuda", Kernels(forward, PLAIN.backward))
    >>> register_kernels("cuda", None)
    """
    if kernels is None:
        KERNELS.pop(device_type, None)
    else:
        KERNELS[device_type] = kernels


@lru_cache(maxsize=1)
def _gpu_kernels() -> Kernels:
    try:
        from sparsebit.numerics.triton_kernels import KERNELS
    except ImportError as error:
        log.warning("fake-quant runs as plain torch on this GPU, several times slower: %s; pip install triton", error)
        return PLAIN
    register_kernels("cuda", KERNELS)  # from now on without the detour
    return KERNELS


def _forward_on_gpu(*arguments: Any) -> Tensor:
    return _gpu_kernels().forward(*arguments)


def _backward_on_gpu(*arguments: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return _gpu_kernels().backward(*arguments)


register_kernels("cuda", Kernels(_forward_on_gpu, _backward_on_gpu))
