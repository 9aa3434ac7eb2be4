"""`fake_quantize`, the function for all code outside this package, and `register_kernels` for one device's kernels.

Without kernels, plain torch runs. `sparsebit.kernels` registers those for CUDA.
"""

from __future__ import annotations

from torch import Tensor

from sparsebit.numerics import float8
from sparsebit.numerics.fake_quant import operator
from sparsebit.numerics.fake_quant.gradients import Gradient
from sparsebit.numerics.fake_quant.operator import KERNELS, PLAIN, Kernels
from sparsebit.numerics.spec import TensorSpec

__all__ = ["PLAIN", "Kernels", "fake_quantize", "register_kernels"]


def fake_quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor, spec: TensorSpec, *, gradient: Gradient = "ste", tag: str = ""
) -> Tensor:
    """The nearest value to each of `x` on the grid of `scale`, `zero_point` and `spec`, in the form and type of `x`.

    `gradient`: "ste" (x only), "lsq" or "pact" (scale and zero point too, if they require it); "relu_ste" and
    "relu_lsq" for a grid that begins at zero and so is a ReLU too. Only the magnitude of a scale counts, not its sign.
    `tag`: the name of the site for export and errors.
    """
    granularity = spec.granularity
    if spec.format == "float8":
        return float8.fake_quantize(x, scale, granularity.axis, tag)
    return operator.fake_quantize(
        x, scale, zero_point, granularity.axis, granularity.size, spec.qmin, spec.qmax, gradient, tag
    )


def register_kernels(device_type: str, kernels: Kernels | None) -> None:
    """Register one device's kernels for the operator, or remove them (None): then plain torch runs.

    Kernels have the arguments and results of `plain.fake_quantize` and `gradients.backward`, and call `PLAIN` for
    other cases. A compiler must be imported inside them, at first use, never at import:

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
