"""Whether two nested structures of values are equal up to rounding, and if not, where they first differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# Largest difference, relative to the largest magnitude of the tensor, that rounding in another order explains.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_OTHER_FLOATS = 0.2


def difference(got: Any, expected: Any, place: str = "the output", *, slack: float = 1.0) -> str | None:
    """A sentence on the first difference in type, structure, dtype, shape or value; None where there is none.

    `slack`: how much more than usual rounding may explain.

    >>> difference(torch.zeros(2), torch.ones(2))
    'the output differs by 1 where the largest value is 1 (2 of 2 elements)'
    """
    if isinstance(expected, Tensor) or isinstance(got, Tensor):
        return _tensor_difference(got, expected, place, slack)
    is_mapping, is_same_type = isinstance(expected, Mapping), type(got) is type(expected)
    if is_mapping and isinstance(got, Mapping) and list(got) == list(expected):
        pairs = [(got[key], expected[key], f"{place}[{key!r}]") for key in expected]
    elif isinstance(expected, (tuple, list)) and is_same_type and len(got) == len(expected):
        pairs = [(a, b, f"{place}[{index}]") for index, (a, b) in enumerate(zip(got, expected, strict=True))]
    elif dataclasses.is_dataclass(expected) and not isinstance(expected, type) and is_same_type and not is_mapping:
        names = [field.name for field in dataclasses.fields(expected)]
        pairs = [(getattr(got, name), getattr(expected, name), f"{place}.{name}") for name in names]
    elif is_mapping or not is_same_type or isinstance(expected, (tuple, list)):
        return _other_form(got, expected, place)
    else:
        return _scalar_difference(got, expected, place)
    return next(filter(None, (difference(*pair, slack=slack) for pair in pairs)), None)


def _tensor_difference(got: Any, expected: Any, place: str, slack: float) -> str | None:
    if not isinstance(got, Tensor) or not isinstance(expected, Tensor):
        return _other_form(got, expected, place)
    if (got.dtype, got.shape) != (expected.dtype, expected.shape):
        return _other_form(got, expected, place)
    if got.device != expected.device or got.is_meta:
        return None if got.is_meta and expected.is_meta else f"{place} is on {got.device}, not on {expected.device}"
    one, other = (_plain(tensor.detach()) for tensor in (got, expected))
    if not one.is_floating_point():
        wrong = one != other
        return f"{place} differs in {_count(wrong)}" if bool(wrong.any()) else None
    # Infinite and undefined values have to be the same ones at the same places.
    finite = other.isfinite()
    odd = (one != other) & ~(one.isnan() & other.isnan()) & ~(finite & one.isfinite())
    if bool(odd.any()):
        return f"{place} is finite, infinite or NaN where it should not be ({_count(odd)})"
    one, other = one[finite].double(), other[finite].double()
    if not one.numel():
        return None
    error, largest = (one - other).abs(), float(other.abs().max())
    limit = _ROUNDING.get(expected.dtype, _ROUNDING[torch.float32] if expected.is_complex() else _OTHER_FLOATS)
    wrong = error > slack * limit * max(largest, torch.finfo(torch.float32).tiny)
    if not bool(wrong.any()):
        return None
    return f"{place} differs by {float(error.max()):.3g} where the largest value is {largest:.3g} ({_count(wrong)})"


def _plain(tensor: Tensor) -> Tensor:
    """The tensor as dense real numbers."""
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _scalar_difference(got: Any, expected: Any, place: str) -> str | None:
    if isinstance(expected, float):
        return difference(torch.tensor(got, dtype=torch.float64).float(), torch.tensor(expected).float(), place)
    if isinstance(expected, (bool, int, str, bytes, complex, torch.dtype, torch.device)) and got != expected:
        return f"{place} is {got!r} in place of {expected!r}"
    return None


def _other_form(got: Any, expected: Any, place: str) -> str:
    return f"{place} is {_shape(got)} in place of {_shape(expected)}"


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with the keys {list(value)}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


def _count(wrong: Tensor) -> str:
    return f"{int(wrong.sum())} of {wrong.numel()} elements"
