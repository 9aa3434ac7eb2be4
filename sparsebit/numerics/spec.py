"""`TensorSpec`: the format of a low-bit tensor, and which of its elements share a scale.

A granularity says which elements share a scale. `to_rows` puts the elements of each scale into one row, and everything
that has one number per scale (ranges, scales, zero points) is a flat tensor in the order of these rows. Specs are
frozen; `replace` returns a changed copy, which is checked like any other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebit.backends import FORMATS, Format
from sparsebit.errors import SpecError

MIN_BITS, MAX_BITS = 1, 16
# Of float8_e4m3fn: the largest number, and how many numbers there are (256 codes less two NaN and a second zero).
LARGEST_FLOAT8, NUM_FLOAT8 = 448, 253


@dataclass(frozen=True)
class PerTensor:
    """One scale for the whole tensor: `(64, 3, 7, 7)` has 1 row of 9408 elements."""

    kind: ClassVar[Literal["tensor"]] = "tensor"
    axis: ClassVar[None] = None
    size: ClassVar[int] = 0


@dataclass(frozen=True)
class PerChannel:
    """One scale for each index along `axis`: with axis 0, `(64, 3, 7, 7)` has 64 rows of 147 elements."""

    kind: ClassVar[Literal["channel"]] = "channel"
    size: ClassVar[int] = 0
    axis: int

    def __post_init__(self) -> None:
        _check_int("PerChannel.axis", self.axis)


@dataclass(frozen=True)
class PerGroup:
    """One scale for each run of `size` consecutive elements along `axis`.

    With axis 1 and size 128, `(4096, 1000)` has scales of shape `(4096, 8)`, kept flat in row-major order: 32768 rows
    of 128 elements, row = 8 * out + group. Where `size` does not divide the axis, its last group is shorter (here 104).
    """

    kind: ClassVar[Literal["group"]] = "group"
    axis: int
    size: int

    def __post_init__(self) -> None:
        _check_int("PerGroup.axis", self.axis)
        _check_int("PerGroup.size", self.size, 1)  # 32, 64 and 128 are usual


Granularity: TypeAlias = PerTensor | PerChannel | PerGroup


@dataclass(frozen=True)
class TensorSpec:
    """A number format: `bits` wide, integers around zero (`symmetric`) or from zero on (affine, with a zero point).

    `qmin`, `qmax`: the lowest and the highest code, -2^(bits-1) and 2^(bits-1) - 1, or 0 and 2^bits - 1; one symmetric
    bit is [-1, 0]; of float8 the lowest and the highest number. `narrow`: a symmetric grid without its lowest code, as
    many below zero as above. `format`: "float8" holds numbers of float8_e4m3fn (4 bits of exponent, 3 of mantissa) in
    the place of integers.

    >>> spec = TensorSpec(4, symmetric=True, granularity=PerChannel(0))
    >>> spec.qmin, spec.qmax, spec.dtype_name
    (-8, 7, 'int4')
    >>> spec.replace(symmetric=False).dtype_name
    'uint4'
    """

    bits: int
    symmetric: bool
    granularity: Granularity = PerTensor()
    narrow: bool = False
    format: Format = "integer"
    qmin: int = field(init=False, repr=False, compare=False)
    qmax: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_int("TensorSpec.bits", self.bits, MIN_BITS, MAX_BITS)
        granularities = "PerTensor(), PerChannel(axis), PerGroup(axis, size)"
        for name, is_known, allowed in (
            ("symmetric", isinstance(self.symmetric, bool), "True, False"),
            ("granularity", isinstance(self.granularity, PerTensor | PerChannel | PerGroup), granularities),
            ("format", self.format in FORMATS, ", ".join(FORMATS)),
        ):
            if not is_known:
                raise SpecError(f"TensorSpec.{name}={getattr(self, name)!r}: allowed: {allowed}")
        rules = FORMATS[self.format]
        is_held = self.bits in rules.bits and self.granularity.kind in rules.granularities
        has_narrow = self.format == "integer" and self.symmetric and self.bits > 1
        if not is_held or self.symmetric not in rules.symmetric or (self.narrow and not has_narrow):
            raise SpecError(
                f"TensorSpec.format={self.format!r} with {self.bits} bits, symmetric={self.symmetric}, "
                f"narrow={self.narrow}, {self.granularity}: {rules.advice}; narrow: symmetric integers from 2 bits on"
            )
        half = 1 << self.bits - 1
        ends = (-half + self.narrow, half - 1) if self.symmetric else (0, 2 * half - 1)
        qmin, qmax = (-LARGEST_FLOAT8, LARGEST_FLOAT8) if self.format == "float8" else ends
        object.__setattr__(self, "qmin", qmin)  # read at every forward: fields, not properties
        object.__setattr__(self, "qmax", qmax)

    @property
    def num_levels(self) -> int:
        """How many codes there are."""
        return NUM_FLOAT8 if self.format == "float8" else self.qmax - self.qmin + 1

    @property
    def dtype_name(self) -> str:
        """`int4`, `uint8`, `float8e4m3fn`, ...: the type's name in ONNX and in reports."""
        if self.format == "float8":
            return "float8e4m3fn"
        return f"{'int' if self.symmetric else 'uint'}{self.bits}"

    def replace(self, **changes: Any) -> TensorSpec:
        """A new spec with some fields changed, checked like any other."""
        return replace(self, **changes)


def to_rows(x: Tensor, granularity: Granularity) -> Tensor:
    """The canonical 2-D form `(rows, n)`: one row per scale, a view wherever the memory allows it.

    | granularity     | rows of `(64, 3, 7, 7)`       |                                                        |
    |-----------------|-------------------------------|--------------------------------------------------------|
    | PerTensor()     | `(1, 9408)`                   | never copies a dense tensor, channels-last included    |
    | PerChannel(0)   | `(64, 147)`                   | never copies a dense weight                            |
    | PerGroup(0, 16) | `(4*3*7*7, 16)` = `(588, 16)` | a ragged last group is filled up with zeros            |

    The order of the elements inside a row is the order in memory, not that of the indices: rows are for statistics.
    """
    if granularity.axis is None:
        return x.reshape(1, -1) if x.is_contiguous() else x.permute(_memory_order(x)).reshape(1, -1)
    axis = axis_in(granularity, x.ndim)
    if granularity.size == 0:
        rows = x.permute(axis, *_memory_order(x, skip=axis))
        return rows.reshape(x.shape[axis], x.numel() // max(x.shape[axis], 1))
    groups = torch.unflatten(pad_groups(x, axis, granularity.size), axis, (-1, granularity.size))
    return groups.movedim(axis + 1, -1).reshape(-1, granularity.size)


def num_rows(shape: Sequence[int], granularity: Granularity) -> int:
    """How many scales a tensor of this shape has."""
    return math.prod(scale_shape(shape, granularity))


def scale_shape(shape: Sequence[int], granularity: Granularity) -> tuple[int, ...]:
    """The shape that the flat scales unfold to: `()`, `(channels,)`, or `shape` with `axis` counted in groups."""
    if granularity.axis is None:
        return ()
    axis = axis_in(granularity, len(shape))
    if granularity.size == 0:
        return (shape[axis],)
    return (*shape[:axis], -(-shape[axis] // granularity.size), *shape[axis + 1 :])


def pad_groups(x: Tensor, axis: int, size: int) -> Tensor:
    """`x` with the last group along `axis` filled up with zeros; `x` itself where it is whole."""
    missing = -x.shape[axis] % size
    return pad(x, (0, 0) * (x.ndim - 1 - axis % x.ndim) + (0, missing)) if missing else x


def axis_in(granularity: PerChannel | PerGroup, ndim: int) -> int:
    """The axis counted from the front of a tensor with `ndim` dimensions."""
    axis = granularity.axis
    if not -ndim <= axis < ndim:
        raise SpecError(
            f"{granularity} on a tensor of {ndim} dimensions: "
            + (f"allowed axes are {-ndim} to {ndim - 1}" if ndim else "a scalar has no axes; use PerTensor()")
        )
    return axis % ndim


def _memory_order(x: Tensor, skip: int | None = None) -> list[int]:
    """Dimensions from the slowest to the fastest in memory, so that a dense tensor flattens without a copy."""
    strides = x.stride()
    return sorted((dim for dim in range(x.ndim) if dim != skip), key=lambda dim: -strides[dim])


def _check_int(name: str, value: object, low: float = -math.inf, high: float = math.inf) -> None:
    if type(value) is not int or not low <= value <= high:
        raise SpecError(f"{name}={value!r}: allowed: whole numbers from {low} to {high}")
