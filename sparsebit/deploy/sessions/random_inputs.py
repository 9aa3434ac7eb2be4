"""Random inputs for a model in the shapes and types that its file declares: for timing, not for accuracy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sparsebit.deploy.onnx_graph.packages import numpy as np
from sparsebit.deploy.onnx_graph.qdq_graph import type_name
from sparsebit.errors import DeploymentError

# An open dimension, by the rank of its tensor: images of 224 pixels, sequences of 64 steps, clips of 16 frames.
LARGEST_INPUT = 1 << 28
OPEN_SIZES = {3: 64, 4: 224, 5: 16}
_OPEN_SIZE = 64
_NUMPY_NAMES = {"float": "float32", "double": "float64"}


def made_up_feeds(
    model: Any, *, feeds: Mapping[str, Any] | None = None, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Arrays by input name, and a description of each (`float32 1x3x224x224, random normal`).

    Arrays in `feeds` take precedence. Floats are random normal numbers, integers 0, masks and booleans 1. An open
    dimension is 1 if it is the first or named after the batch, else from `OPEN_SIZES`; `shapes` overrides it.
    """
    given, shapes = dict(feeds or {}), dict(shapes or {})
    stored = {tensor.name for tensor in model.graph.initializer}
    inputs = {value.name: value for value in model.graph.input if value.name not in stored}
    if unknown := [name for name in [*given, *shapes] if name not in inputs]:
        raise DeploymentError(f"input {unknown[0]!r}: the file has none of this name; it has {', '.join(inputs)}")
    random = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    words: dict[str, str] = {}
    for name, value in inputs.items():
        if name in given:
            array, how = np.asarray(given[name]), "given"
        else:
            shape = _shape(name, value, shapes.get(name))
            array, how = _filled(random, name, type_name(value.type.tensor_type.elem_type), shape)
        arrays[name], words[name] = array, f"{array.dtype} {'x'.join(map(str, array.shape)) or 'scalar'}, {how}"
    return arrays, words


def _shape(name: str, value: Any, wanted: tuple[int, ...] | None) -> tuple[int, ...]:
    """The shape of an input; a damaged or hostile file may declare one that no machine has memory for."""
    dims = list(value.type.tensor_type.shape.dim)
    shape = wanted or tuple(_size(dim, position, len(dims)) for position, dim in enumerate(dims))
    shown = "x".join(map(str, shape))
    fixed = [dim.dim_value if dim.HasField("dim_value") else None for dim in dims]
    if wanted and (len(fixed) != len(wanted) or any(a not in (None, b) for a, b in zip(fixed, wanted, strict=True))):
        allowed = "x".join(str(size or dim.dim_param or "?") for size, dim in zip(fixed, dims, strict=True))
        raise DeploymentError(f"input {name!r} of shape {shown}: the file takes {allowed}")
    if math.prod(shape) > LARGEST_INPUT:
        raise DeploymentError(
            f"input {name!r} of shape {shown}: {math.prod(shape)} numbers, and at most {LARGEST_INPUT} are made up; "
            "pass your own array (feeds=), or export the file with that dimension open"
        )
    return shape


def _size(dim: Any, position: int, rank: int) -> int:
    if dim.HasField("dim_value") and dim.dim_value > 0:
        return int(dim.dim_value)
    if position == 0 or "batch" in dim.dim_param.lower():
        return 1
    return OPEN_SIZES.get(rank, _OPEN_SIZE)


def _filled(random: Any, name: str, kind: str, shape: tuple[int, ...]) -> tuple[Any, str]:
    dtype = np.dtype(_NUMPY_NAMES.get(kind, kind)) if kind != "string" else None
    if dtype is None or dtype.kind not in "fiub":
        raise DeploymentError(f"input {name!r} is of type {kind}: pass your own array, feeds={{{name!r}: ...}}")
    if dtype.kind == "f":
        return random.standard_normal(shape).astype(dtype), "random normal"
    ones = dtype.kind == "b" or "mask" in name.lower()
    return (np.ones if ones else np.zeros)(shape, dtype), "ones" if ones else "zeros"
