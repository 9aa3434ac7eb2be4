from __future__ import annotations

import math

import pytest
import torch

from sparsebit.errors import SpecError
from sparsebit.numerics.spec import (
    Granularity,
    PerChannel,
    PerGroup,
    PerTensor,
    TensorSpec,
    num_rows,
    scale_shape,
    to_rows,
)


@pytest.mark.parametrize(("bits", "symmetric", "ends", "name"), [
    (1, True, (-1, 0), "int1"), (1, False, (0, 1), "uint1"), (4, True, (-8, 7), "int4"), (8, True, (-128, 127), "int8"),
    (8, False, (0, 255), "uint8"), (16, True, (-32768, 32767), "int16"), (16, False, (0, 65535), "uint16"),
])  # fmt: skip
def test_codes_of_a_format(bits: int, symmetric: bool, ends: tuple[int, int], name: str) -> None:
    spec = TensorSpec(bits, symmetric)
    assert (spec.qmin, spec.qmax) == ends
    assert spec.dtype_name == name
    assert spec.num_levels == spec.qmax - spec.qmin + 1


def test_codes_of_8_bit_floats() -> None:
    spec = TensorSpec(8, True, format="float8")
    assert (spec.qmin, spec.qmax, spec.num_levels, spec.dtype_name) == (-448, 448, 253, "float8e4m3fn")
    assert spec != TensorSpec(8, True)


@pytest.mark.parametrize(("bits", "symmetric", "granularity"), [
    (4, True, PerTensor()), (8, False, PerTensor()), (8, True, PerGroup(1, 4)),
])  # fmt: skip
def test_other_8_bit_floats_are_refused(bits: int, symmetric: bool, granularity: Granularity) -> None:
    with pytest.raises(SpecError, match="fp8 has 8 bits"):
        TensorSpec(bits, symmetric, granularity, format="float8")


def test_a_narrow_grid_is_symmetric_around_zero() -> None:
    spec = TensorSpec(4, True, narrow=True)
    assert (spec.qmin, spec.qmax, spec.num_levels) == (-7, 7, 15)
    for wrong in ({"bits": 1}, {"symmetric": False}, {"bits": 8, "format": "float8"}):
        with pytest.raises(SpecError, match="narrow: symmetric integers from 2 bits on"):
            spec.replace(**wrong)


def test_a_spec_is_shown_as_it_is_written() -> None:
    spec = TensorSpec(4, True, PerGroup(1, 32), narrow=True)
    assert eval(repr(spec)) == spec


def test_a_spec_is_a_value() -> None:
    spec = TensorSpec(8, True, PerChannel(0))
    assert spec == TensorSpec(8, True, PerChannel(0))
    assert len({spec, spec.replace(bits=4), spec.replace(granularity=PerTensor()), spec.replace()}) == 3
    with pytest.raises(AttributeError):
        spec.bits = 4  # type: ignore[misc]


@pytest.mark.parametrize("bits", [0, -1, 17, 3.0, True, "8", None])
def test_bits_that_do_not_exist_are_refused_by_value(bits: object) -> None:
    with pytest.raises(SpecError, match=f"TensorSpec.bits={bits!r}"):
        TensorSpec(bits, True)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"TensorSpec\.bits"):
        TensorSpec(8, True).replace(bits=bits)


def test_other_fields_are_checked_too() -> None:
    with pytest.raises(SpecError, match=r"symmetric=1: allowed: True, False"):
        TensorSpec(8, 1)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"granularity='channel': allowed: PerTensor"):
        TensorSpec(8, True, "channel")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"PerGroup.size=0: allowed: whole numbers from 1"):
        PerGroup(1, 0)
    with pytest.raises(SpecError, match=r"PerChannel.axis=None: allowed: whole numbers"):
        PerChannel(None)  # type: ignore[arg-type]


SHAPE = (6, 4, 5, 3)


@pytest.mark.parametrize(("granularity", "rows"), [
    (PerTensor(), (1, 360)), (PerChannel(0), (6, 60)), (PerChannel(1), (4, 90)), (PerChannel(-1), (3, 120)),
    (PerGroup(0, 3), (2 * 4 * 5 * 3, 3)), (PerGroup(1, 4), (6 * 1 * 5 * 3, 4)), (PerGroup(-2, 2), (6 * 4 * 3 * 3, 2)),
    (PerGroup(1, 7), (6 * 1 * 5 * 3, 7)),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
def test_rows_hold_the_elements_that_share_a_scale(
    granularity: PerTensor | PerChannel | PerGroup, rows: tuple[int, int], layout: torch.memory_format
) -> None:
    # Every element is told apart by its value, and the expected row of each is counted by hand.
    x = torch.arange(1.0, math.prod(SHAPE) + 1).reshape(SHAPE).contiguous(memory_format=layout)
    found = to_rows(x, granularity)
    assert found.shape == rows
    assert num_rows(SHAPE, granularity) == rows[0]
    expected: list[set[float]] = [set() for _ in range(rows[0])]
    units = scale_shape(SHAPE, granularity)
    for index in torch.cartesian_prod(*map(torch.arange, SHAPE)).tolist():
        row = 0
        if isinstance(granularity, PerChannel):
            row = index[granularity.axis]
        elif isinstance(granularity, PerGroup):
            unit = list(index)
            unit[granularity.axis] //= granularity.size
            for size, position in zip(units, unit, strict=True):
                row = row * size + position
        expected[row].add(x[tuple(index)].item())
    assert [set(row) - {0.0} for row in found.tolist()] == expected


def _is_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


@pytest.mark.parametrize("axis", [None, 0, 1], ids=["tensor", "axis0", "axis1"])
def test_dense_tensors_become_rows_without_a_copy(axis: int | None) -> None:
    last = torch.randn(6, 4, 5, 3).contiguous(memory_format=torch.channels_last)
    assert _is_view(to_rows(last, PerTensor() if axis is None else PerChannel(axis)), last)
    video = torch.randn(2, 4, 5, 3, 2).contiguous(memory_format=torch.channels_last_3d)
    assert _is_view(to_rows(video, PerTensor()), video)
    assert _is_view(to_rows(last.transpose(0, 2), PerTensor()), last)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2)], ids=str)
def test_scalars_and_empty_tensors_have_one_row(shape: tuple[int, ...]) -> None:
    assert to_rows(torch.zeros(shape), PerTensor()).shape == (1, math.prod(shape))


def test_empty_batches_keep_their_channels() -> None:
    assert to_rows(torch.zeros(0, 4, 5, 5), PerChannel(1)).shape == (4, 0)


@pytest.mark.parametrize("granularity", [PerChannel(2), PerChannel(-3), PerGroup(4, 2)], ids=str)
def test_an_axis_that_the_tensor_lacks_is_refused(granularity: PerChannel | PerGroup) -> None:
    with pytest.raises(SpecError, match=r"on a tensor of 2 dimensions: allowed axes are -2 to 1"):
        to_rows(torch.zeros(3, 4), granularity)
    with pytest.raises(SpecError, match=r"a scalar has no axes; use PerTensor\(\)"):
        num_rows((), granularity)
