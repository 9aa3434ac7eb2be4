"""Operators that move elements, on Numbers: the row moves their places, which are constant, and those are looked up."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from sparsebit.deploy.loading.building.call import Call
from sparsebit.deploy.loading.building.operator_table import OperatorRow
from sparsebit.deploy.loading.building.values import Number, Numbers, Value, is_constant, items_of, numbers

_MOVES = frozenset({
    "Reshape", "Transpose", "Slice", "Gather", "Squeeze", "Unsqueeze", "Concat", "Split", "Flatten", "Expand", "Tile",
    "GatherElements",
})  # fmt: skip


def moves_numbers(call: Call) -> bool:
    """Whether the call moves elements of Numbers to places that are known."""
    moved, others = _parts(call)
    return (
        call.node.op_type in _MOVES
        and any(isinstance(value, Numbers) for value in moved)
        and all(isinstance(value, Numbers) or is_constant(value) for value in moved)
        and all(value is None or is_constant(value) for value in others)
    )


def moved_numbers(row: OperatorRow, call: Call) -> list[Value]:
    """The outputs of such a call."""
    moved, others = _parts(call)
    items: list[Number] = []
    places: list[Any] = []
    for value in moved:
        found = items_of(value)
        places.append(torch.arange(len(items), len(items) + len(found)).reshape(value.shape))
        items += found
    outputs = row.build(dataclasses.replace(call, inputs=(*places, *others)))
    listed = outputs if isinstance(outputs, list) else [outputs]
    dtype = moved[0].dtype
    return [numbers([items[place] for place in out.reshape(-1).tolist()], out.shape, dtype) for out in listed]


def _parts(call: Call) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
    """The inputs whose elements are moved, and those that say where to."""
    split = len(call.inputs) if call.node.op_type == "Concat" else 1
    return call.inputs[:split], call.inputs[split:]
