"""fake_quantize: the only door to fake-quant for the rest of the house, and the slot where a device's kernels go in."""

from __future__ import annotations

from torch import Tensor

from sparsebit.numerics.gradients import Gradient
from sparsebit.numerics import operator
from sparsebit.numerics.operator import KERNELS, Kernels
from sparsebit.numerics.spec import TensorSpec


def fake_quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor, spec: TensorSpec, *, gradient: Gradient = "ste", tag: str = ""
) -> Tensor:
    """The nearest value to each of `x` on the grid of `scale`, `zero_point` and `spec`, in the shape, strides and type of `x`.

    `gradient`: "ste" (x only) or "lsq" (scale and zero point too, where they require it). `tag`: the site's name, seen by export.
    """
    granularity = spec.granularity
    return operator.fake_quantize(
        x, scale, zero_point, granularity.axis, granularity.size, spec.qmin, spec.qmax, gradient, tag
    )


def register_kernels(device_type: str, kernels: Kernels | None) -> None:
    """Puts one device's kernels behind the operator, or takes them out again (None): plain torch runs where there are none.

    Kernels take and give what the plain functions do, and hand to `PLAIN` what they cannot do:

    >>> def forward(x, scale, zero_point, axis, group_size, qmin, qmax):
    ...     from sparsebit.numerics import triton_kernels  # at first use, never at import
    ...
    ...     return triton_kernels.forward(x, scale, zero_point, axis, group_size, qmin, qmax)
    >>> register_kernels("cuda", Kernels(forward, PLAIN.backward))  # doctest: +SKIP
    """
    if kernels is None:
        KERNELS.pop(device_type, None)
    else:
        KERNELS[device_type] = kernels
