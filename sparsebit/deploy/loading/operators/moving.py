"""Operators that move, repeat or cut out elements at places that are known from the shape."""

from __future__ import annotations

import operator as python
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from sparsebit.deploy.loading.building.call import Call
from sparsebit.deploy.loading.building.operator_table import operator
from sparsebit.deploy.loading.building.values import Number, Value, example_of, is_constant

_PAD_MODES = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}
_LARGEST_INDEX = 2**31 - 1  # what exporters write for "to the end"


@operator("Transpose")
def _transpose(call: Call) -> Value:
    order = tuple(call.attribute("perm", reversed(range(call.rank()))))
    found = call.method("permute", call.inputs[0], order)
    return call.graph.named(found, call.inputs[0]) if is_constant(found) else found


@operator("Concat")
def _concat(call: Call) -> Value:
    parts = [v for v in call.inputs if not (is_constant(v) and tuple(v.shape) == (0,))] or list(call.inputs[:1])
    return parts[0] if len(parts) == 1 else call.emit(torch.cat, parts, call.attribute("axis"))


@operator("Split")
def _split(call: Call) -> list[Value]:
    value, axis = call.inputs[0], call.axis(call.attribute("axis", 0))
    sizes = call.setting("split", 1)
    count = len(call.node.output)
    if sizes is None:
        length = call.fixed_size(axis)
        if length is None:
            found = call.emit(torch.chunk, value, count, axis)
            return [call.emit(python.getitem, found, place) for place in range(count)]
        each = -(-length // count)
        sizes = [min(each, length - place * each) for place in range(count)]
    found = call.emit(torch.split, value, sizes, axis)
    if isinstance(found, tuple):
        return list(found)
    return [call.emit(python.getitem, found, place) for place in range(count)]


@operator("Slice")
def _slice(call: Call) -> Value:
    value = call.inputs[0]
    starts, ends = (call.graph.sizes(call.inputs[place]) for place in (1, 2))
    axes = range(len(starts)) if call.input(3) is None else call.constant(3, "axes").reshape(-1).tolist()
    steps = [1] * len(starts) if call.input(4) is None else call.constant(4, "steps").reshape(-1).tolist()
    places: list[Any] = [slice(None)] * call.rank()
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        place = call.axis(axis)
        if step < 0:
            value, start, end, step = _reversed(call, value, place, start, end, step)
        places[place] = _piece(start, end, step)
    while places and _is_whole(places[-1]):
        places.pop()
    return call.emit(python.getitem, value, tuple(places)) if places else value


def _is_whole(piece: slice) -> bool:
    return piece.start is None and piece.stop is None and piece.step is None


def _piece(start: Number, end: Number, step: int) -> slice:
    first = None if not isinstance(start, fx.Proxy) and start == 0 else start
    last = None if not isinstance(end, fx.Proxy) and end >= _LARGEST_INDEX else end
    return slice(first, last, None if step == 1 else step)


def _reversed(
    call: Call, value: Value, axis: int, start: Number, end: Number, step: int
) -> tuple[Value, Any, Any, int]:
    """A slice with a negative step: that of the flipped tensor."""
    if any(isinstance(one, fx.Proxy) for one in (start, end)):
        raise call.refusal("a negative step between ends that are computed at run time has no rule")
    flipped = call.emit(torch.flip, value, (axis,))
    if (start == -1 or start >= _LARGEST_INDEX) and end < -_LARGEST_INDEX:
        return flipped, 0, _LARGEST_INDEX, -step
    size = call.fixed_size(axis)
    if size is None:
        raise call.refusal("a negative step along an axis whose size the file leaves open has no rule")
    first = min(max(start + size if start < 0 else start, 0), size - 1)
    last = min(max(end + size if end < 0 else end, -1), size - 1)
    return flipped, size - 1 - first, size - 1 - last, -step


@operator("Tile")
def _tile(call: Call) -> Value:
    value, times = call.inputs[0], call.graph.sizes(call.inputs[1])
    call.limited(tuple(example_of(a) * b for a, b in zip(map(example_of, times), example_of(value).shape, strict=True)))
    return call.method("repeat", value, tuple(times))


@operator("Pad")
def _pad(call: Call) -> Value:
    value = call.inputs[0]
    pads, fill = call.graph.sizes(call.inputs[1]), call.input(2)
    axes = range(call.rank()) if call.input(3) is None else [call.axis(a) for a in call.constant(3, "axes").tolist()]
    number = 0.0 if fill is None else call.constant(2, "value").item()
    mode = _PAD_MODES.get(call.attribute("mode", "constant"))
    if mode is None:
        raise call.refusal(f"mode {call.attribute('mode')}; allowed: {', '.join(_PAD_MODES)}")
    both: dict[int, tuple[Number, Number]] = {
        axis: (pads[place], pads[place + len(axes)]) for place, axis in enumerate(axes)
    }
    pairs = [pad for axis in reversed(range(call.rank())) for pad in both.get(axis, (0, 0))]
    while len(pairs) >= 2 and _is_zero(pairs[-1]) and _is_zero(pairs[-2]):
        pairs = pairs[:-2]
    if not pairs:
        return value
    call.limited(
        tuple(size + abs(int(example_of(pad))) for size, pad in zip(example_of(value).shape * 2, pairs, strict=False))
    )
    if mode != "constant":
        return _pad_by_content(call, value, pairs, mode)
    if not example_of(value).is_floating_point():
        number = int(number)
    return call.emit(F.pad, value, pairs, value=number)


def _is_zero(number: Number) -> bool:
    return not isinstance(number, fx.Proxy) and number == 0


def _pad_by_content(call: Call, value: Value, pairs: list[Number], mode: str) -> Value:
    """Torch pads the last axes of a batch with channels; a missing leading axis is added for the call."""
    wanted = len(pairs) // 2 + 2
    missing = wanted - call.rank()
    if missing < 0:
        pairs = [*pairs, *[0, 0] * -missing]
    for _ in range(missing):
        value = call.emit(torch.unsqueeze, value, 0)
    value = call.emit(F.pad, value, pairs, mode)
    for _ in range(missing):
        value = call.emit(torch.squeeze, value, 0)
    return value


@operator("DepthToSpace")
def _depth_to_space(call: Call) -> Value:
    value, block = call.inputs[0], call.attribute("blocksize")
    if call.attribute("mode", "DCR") == "CRD":
        return call.emit(F.pixel_shuffle, value, block)
    n, c, h, w = (call.size(axis) for axis in range(4))
    channels = example_of(c) // block**2
    split = call.method("reshape", value, (n, block, block, channels, h, w))
    moved = call.method("permute", split, (0, 3, 4, 1, 5, 2))
    high, wide = (call.number(python.mul, size, block) for size in (h, w))
    return call.method("reshape", moved, (n, channels, high, wide))


@operator("SpaceToDepth")
def _space_to_depth(call: Call) -> Value:
    value, block = call.inputs[0], call.attribute("blocksize")
    n, _, h, w = (call.size(axis) for axis in range(4))
    channels = example_of(value).shape[1]
    high, wide = (call.number(python.floordiv, size, block) for size in (h, w))
    split = call.method("reshape", value, (n, channels, high, block, wide, block))
    return call.method(
        "reshape", call.method("permute", split, (0, 3, 5, 1, 2, 4)), (n, channels * block**2, high, wide)
    )


@operator("Trilu")
def _trilu(call: Call) -> Value:
    diagonal = call.input(1)
    offset = 0 if diagonal is None else call.graph.sizes(diagonal)[0]
    return call.emit(torch.triu if call.attribute("upper", 1) else torch.tril, call.inputs[0], offset)
