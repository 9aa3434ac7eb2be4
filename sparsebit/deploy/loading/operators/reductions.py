"""Reductions, cumulative sums, and the places of the largest elements."""

from __future__ import annotations

import operator as python
from collections.abc import Callable

import torch

from sparsebit.deploy.loading.building.call import Call
from sparsebit.deploy.loading.building.operator_table import operator
from sparsebit.deploy.loading.building.values import Numbers, Value, example_of, numbers

_REDUCTIONS: dict[str, Callable[[Call, Value, list[int], bool], Value]] = {
    "ReduceMean": lambda call, x, axes, keep: call.method("mean", x, tuple(axes), keepdim=keep),
    "ReduceSum": lambda call, x, axes, keep: call.emit(torch.sum, x, tuple(axes), keepdim=keep),
    "ReduceMax": lambda call, x, axes, keep: call.emit(torch.amax, x, tuple(axes), keepdim=keep),
    "ReduceMin": lambda call, x, axes, keep: call.emit(torch.amin, x, tuple(axes), keepdim=keep),
    "ReduceL1": lambda call, x, axes, keep: call.emit(torch.sum, call.emit(torch.abs, x), tuple(axes), keepdim=keep),
    "ReduceL2": lambda call, x, axes, keep: call.emit(torch.linalg.vector_norm, x, 2, tuple(axes), keepdim=keep),
    "ReduceSumSquare": lambda call, x, axes, keep: call.emit(
        torch.sum, call.emit(torch.mul, x, x), tuple(axes), keepdim=keep
    ),
    "ReduceLogSum": lambda call, x, axes, keep: call.emit(
        torch.log, call.emit(torch.sum, x, tuple(axes), keepdim=keep)
    ),
    "ReduceLogSumExp": lambda call, x, axes, keep: call.emit(torch.logsumexp, x, tuple(axes), keepdim=keep),
}


_OF_FLOATS = frozenset({"ReduceMean", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp"})


@operator(*_REDUCTIONS, "ReduceProd")
def _reduce(call: Call) -> Value:
    value = call.graph.tensor(call.inputs[0])
    if call.node.op_type in _OF_FLOATS and not example_of(value).is_floating_point():
        raise call.refusal(f"on {example_of(value).dtype}, where runtimes round at places of their own, it has no rule")
    given = call.setting("axes", 1, [])
    if not given and call.attribute("noop_with_empty_axes", 0):
        return value
    axes = [call.axis(axis) for axis in given or range(call.rank())]
    keep = bool(call.attribute("keepdims", 1))
    if not axes:
        return value
    if call.node.op_type == "ReduceProd":
        return _product(call, call.inputs[0], sorted(axes, reverse=True), keep)
    found = _REDUCTIONS[call.node.op_type](call, value, axes, keep)
    dtype = example_of(value).dtype
    return found if example_of(found).dtype == dtype else call.method("to", found, dtype)


def _product(call: Call, value: Value, axes: list[int], keep: bool) -> Value:
    if isinstance(value, Numbers):
        items = list(value.items)
        found = items[0]
        for item in items[1:]:
            found = call.emit(python.mul, found, item)
        return numbers([found], (1,) if keep else (), value.dtype)
    for axis in axes:
        value = call.emit(torch.prod, value, axis, keepdim=keep, dtype=example_of(value).dtype)
    return value


@operator("ArgMax", "ArgMin")
def _arg(call: Call) -> Value:
    if call.attribute("select_last_index", 0):
        raise call.refusal("select_last_index=1 has no counterpart in torch")
    function = torch.argmax if call.node.op_type == "ArgMax" else torch.argmin
    return call.emit(
        function, call.inputs[0], call.axis(call.attribute("axis", 0)), keepdim=bool(call.attribute("keepdims", 1))
    )


@operator("TopK")
def _top_k(call: Call) -> list[Value]:
    axis = call.axis(call.attribute("axis", -1))
    count = call.graph.sizes(call.inputs[1])[0]
    # Equal elements may change places: torch.sort(stable=True) keeps them in order, but has no ONNX form.
    found = call.emit(
        torch.topk, call.inputs[0], count, axis, bool(call.attribute("largest", 1)), bool(call.attribute("sorted", 1))
    )
    return list(found) if isinstance(found, tuple) else [call.emit(python.getitem, found, place) for place in range(2)]


@operator("CumSum")
def _cumsum(call: Call) -> Value:
    value = call.inputs[0]
    axis = call.axis(int(call.constant(1, "axis").item()))
    is_reverse, is_exclusive = bool(call.attribute("reverse", 0)), bool(call.attribute("exclusive", 0))
    found = call.emit(torch.flip, value, (axis,)) if is_reverse else value
    total = call.emit(torch.cumsum, found, axis)
    if is_exclusive:
        total = call.emit(torch.sub, total, found)
    total = call.emit(torch.flip, total, (axis,)) if is_reverse else total
    return call.method("to", total, example_of(value).dtype)
