"""Compares the module of a file with ONNX Runtime: on data, and at other sizes of axes that the file leaves open."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from sparsebit.deploy.comparing.file_model import Feeds
from sparsebit.deploy.onnx_graph.packages import numpy
from sparsebit.deploy.sessions.session import Session
from sparsebit.errors import DeploymentError

_LEAST_RANGE = 1e-2  # of the largest value: the range of nearly equal numbers is that of their roundings
# A channel of small numbers may be next to one of large numbers, as scores next to coordinates: a channel may differ by
# so many tolerances of its own range, or by a tenth of the tolerance of the whole output's.
_OF_CHANNEL, _OF_ALL = 100, 0.1
_ROUNDED_APART = 1e-3  # of integers that are computed from floats, the share that may differ
_MOST_AXES = 6
_LARGEST_INPUT = 1 << 24


def compare(module: fx.GraphModule, session: Session, feeds: Feeds, tolerance: float, path: str) -> None:
    """Raise where an output differs from ONNX Runtime's."""
    for fault in _faults(module, session.run(feeds), session, feeds, tolerance):
        raise DeploymentError(
            f"{path}: the module's {fault}, so the module is not given out. Please report the operators of the file"
        )


def compare_other_sizes(
    model: Any, module: fx.GraphModule, session: Session, feeds: Feeds, tolerance: float, path: str
) -> None:
    """Raise where the module differs at another size of an open axis, if ONNX Runtime takes that size."""
    for (name, axis), places in list(_open_axes(model, session).items())[:_MOST_AXES]:
        size = feeds[name].shape[axis]
        for other in [size + 1, 1] if axis == 0 else [2 * size, size + 1]:
            changed = {key: _resized(array, places.get(key), other) for key, array in feeds.items()}
            if other == size or max(array.size for array in changed.values()) > _LARGEST_INPUT:
                continue
            try:
                expected = session.run(changed)
            except DeploymentError:  # not a size for this file
                continue
            try:
                fault = next(_faults(module, expected, session, changed, tolerance), "")
            except Exception as error:  # any error of an operator
                fault = f"forward fails with {type(error).__name__}: {str(error).strip().splitlines()[0]}"
            if fault:
                fixed = ",".join(map(str, feeds[name].shape))
                raise DeploymentError(
                    f"{path}: where axis {axis} of input {name} is {other}, not {size}, the module's {fault}. If one "
                    "size is enough, fix it in the file: python -m onnxruntime.tools.make_dynamic_shape_fixed "
                    f"--input_name {name} --input_shape {fixed} {path} fixed.onnx"
                )


def _faults(
    module: fx.GraphModule, expected: list[Any], session: Session, feeds: Feeds, tolerance: float
) -> Iterator[str]:
    with torch.no_grad():
        found = module(*(torch.from_numpy(numpy.array(feeds[name])) for name in session.inputs))
    outputs: tuple[Tensor, ...] = found if isinstance(found, tuple) else (found,)
    for name, want, have in zip(session.outputs, expected, outputs, strict=True):
        array = have.detach().numpy()
        if want.shape != array.shape:
            yield f"output {name} differs from ONNX Runtime's in shape: {array.shape}, not {want.shape}"
        elif want.dtype != array.dtype:
            yield f"output {name} differs from ONNX Runtime's in type: {array.dtype}, not {want.dtype}"
        elif not (share := difference(want, array)) <= tolerance:
            yield (
                f"output {name} differs from ONNX Runtime's by {share:.1e} of its range; at most {tolerance:.0e} is "
                "allowed"
            )
        elif (where := _worst_channel(want, array, tolerance)) is not None:
            yield f"output {name} differs from ONNX Runtime's in {where}, whose numbers are smaller than the others"


def difference(expected: Any, found: Any) -> float:
    """The largest difference of two float arrays as a share of the expected one's range.

    For other types it is 1.0 if more than a thousandth of the elements differ, else 0.0.
    """
    if not expected.size:
        return 0.0
    if expected.dtype.kind != "f":
        return float((expected != found).mean() > _ROUNDED_APART)
    return float(_apart(expected, found).max()) / _extent(expected)


def _apart(expected: Any, found: Any) -> Any:
    """The difference of each element; 0 where both are NaN or the same infinity."""
    expected, found = expected.astype(numpy.float64), found.astype(numpy.float64)
    is_equal = (expected == found) | (numpy.isnan(expected) & numpy.isnan(found))
    with numpy.errstate(invalid="ignore"):
        return numpy.where(is_equal, 0.0, numpy.abs(expected - found))


def _extent(array: Any) -> float:
    finite = array[numpy.isfinite(array)].astype(numpy.float64)
    largest = float(numpy.abs(finite).max(initial=0.0))
    return max(float(numpy.ptp(finite)) if finite.size else 0.0, _LEAST_RANGE * largest) or 1.0


def _worst_channel(expected: Any, found: Any, tolerance: float) -> str | None:
    """A place of the second or the last axis whose numbers differ by much of their own range."""
    if expected.dtype.kind != "f" or expected.ndim < 2 or not expected.size:
        return None
    apart, least = _apart(expected, found), _OF_ALL * tolerance * _extent(expected)
    for axis in {1, expected.ndim - 1}:
        others = tuple(place for place in range(expected.ndim) if place != axis)
        for place in numpy.flatnonzero(apart.max(others) > least):
            of_channel = numpy.take(apart, place, axis).max()
            if of_channel > _OF_CHANNEL * tolerance * _extent(numpy.take(expected, place, axis)):
                return f"place {place} of axis {axis}"
    return None


def _open_axes(model: Any, session: Session) -> dict[tuple[str, int], dict[str, list[int]]]:
    """The axes that the file leaves open, those of one name together: the first one -> all, by input."""
    found: dict[tuple[Any, ...], dict[str, list[int]]] = {}
    for entry in model.graph.input:
        for axis, size in enumerate(session.input_shapes.get(entry.name, ())):
            if size is None:
                name = entry.type.tensor_type.shape.dim[axis].dim_param
                found.setdefault((name,) if name else ("", axis), {}).setdefault(entry.name, []).append(axis)
    return {(name, axes[0]): places for places in found.values() for name, axes in list(places.items())[:1]}


def _resized(array: Any, axes: list[int] | None, size: int) -> Any:
    """The array with that size along the axes: its elements again from the start."""
    for axis in axes or ():
        array = numpy.take(array, numpy.arange(size) % array.shape[axis], axis)
    return array
