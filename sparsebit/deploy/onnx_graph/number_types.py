"""Which ONNX type holds a number format, and from which opset on."""

from __future__ import annotations

from dataclasses import dataclass

from sparsebit.errors import DeploymentError
from sparsebit.numerics.spec import LARGEST_FLOAT8

# Bits of an ONNX integer type -> the first opset whose QuantizeLinear and DequantizeLinear support it.
_FIRST_OPSET = {2: 25, 4: 21, 8: 13, 16: 21, 32: 13}
BLOCK_OPSET = 21
ACTIVATION_WIDTHS = frozenset({8, 16})
BIAS_BITS = 32


@dataclass(frozen=True)
class Storage:
    """`int4` and the like: the ONNX type's name, its ends, and the first opset that has it."""

    name: str
    width: int
    low: int
    high: int
    opset: int


FLOAT8 = Storage("FLOAT8E4M3FN", 8, -LARGEST_FLOAT8, LARGEST_FLOAT8, 19)


def num_bits(qmin: int, qmax: int) -> int:
    """The bits of the grid [qmin, qmax]."""
    return (qmax - qmin).bit_length()


def storage_for(qmin: int, qmax: int, widths: frozenset[int], site: str) -> Storage:
    """The narrowest type of `widths` that can hold the codes. A 3-bit weight is stored in int4, with its own codes."""
    bits = num_bits(qmin, qmax)
    allowed = {BIAS_BITS} if bits == BIAS_BITS else widths
    width = min((width for width in allowed if width >= bits), default=None)
    if width is None:
        raise DeploymentError(f"{site}: {bits} bits; the widest type of this backend's file there has {max(widths)}")
    low = -(1 << width - 1) if qmin < 0 else 0
    return Storage(f"{'' if low else 'U'}INT{width}", width, low, low + (1 << width) - 1, _FIRST_OPSET[width])
