"""Operators that move, select or repeat elements, and those of shapes."""

from __future__ import annotations

import operator as python
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from sparsebit.deploy.loading.call import Call, torch_type
from sparsebit.deploy.loading.operator_table import operator
from sparsebit.deploy.loading.values import Number, Numbers, Value, example_of, is_constant, numbers, rank
from sparsebit.deploy.onnx_graph.packages import numpy, onnx

_LARGEST_INDEX = 2**31 - 1  # what exporters write for "to the end"
_PAD_MODES = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}


@operator("Identity")
def _identity(call: Call) -> Value:
    return call.inputs[0]


@operator("Constant")
def _constant(call: Call) -> Tensor:
    node = call.node
    if len(node.attribute) != 1 or node.attribute[0].name not in _CONSTANTS:
        raise call.refusal("a constant of numbers is allowed, neither sparse nor of texts")
    value = onnx.helper.get_attribute_value(node.attribute[0])
    dtype = _CONSTANTS[node.attribute[0].name]
    return tensor_of(value) if dtype is None else torch.tensor(value, dtype=dtype)


_CONSTANTS: dict[str, torch.dtype | None] = {
    "value": None, "value_float": torch.float32, "value_floats": torch.float32,
    "value_int": torch.int64, "value_ints": torch.int64,
}  # fmt: skip


def tensor_of(stored: Any) -> Tensor:
    """A TensorProto as a tensor."""
    array = onnx.numpy_helper.to_array(stored)
    if str(array.dtype) == "bfloat16":
        return torch.from_numpy(array.astype(numpy.float32)).to(torch.bfloat16)
    return torch.from_numpy(numpy.array(array))  # a copy that may be written to; of rank 0 too


@operator("Shape")
def _shape(call: Call) -> Value:
    first, last = call.attribute("start", 0), call.attribute("end", None)
    sizes = call.graph.shape(call.inputs[0], call.node.input[0])
    return numbers(call.graph.sizes(sizes)[first:last])


@operator("Size")
def _size(call: Call) -> Value:
    found: Number = 1
    for size in call.graph.sizes(call.graph.shape(call.inputs[0], call.node.input[0])):
        is_known = not isinstance(found, fx.Proxy) and not isinstance(size, fx.Proxy)
        found = found * size if is_known else call.emit(python.mul, found, size)
    return numbers([found], ())


@operator("ConstantOfShape")
def _constant_of_shape(call: Call) -> Value:
    stored = call.attribute("value")
    value = torch.zeros(1) if stored is None else tensor_of(stored)
    sizes = call.limited(call.graph.sizes(call.inputs[0]))
    return call.emit(torch.full, sizes, value.item(), dtype=value.dtype)


@operator("Range")
def _range(call: Call) -> Value:
    dtype = example_of(call.inputs[0]).dtype
    first, last, step = (call.graph.sizes(value)[0] for value in call.inputs)
    start, end, stride = (example_of(one) for one in (first, last, step))
    call.limited((max(int((end - start) / (stride or 1)), 0),))
    return call.emit(torch.arange, first, last, step, dtype=dtype)


@operator("EyeLike")
def _eye_like(call: Call) -> Value:
    value = call.inputs[0]
    number = call.attribute("dtype")
    dtype = example_of(value).dtype if number is None else torch_type(number, call)
    rows, columns = example_of(value).shape
    offset = call.attribute("k", 0)
    return torch.diag(torch.ones(max(rows, columns) + abs(offset), dtype=dtype), offset)[:rows, :columns]


@operator("Reshape")
def _reshape(call: Call) -> Value:
    value, target = call.inputs[0], call.inputs[1]
    sizes = list(call.graph.sizes(target))
    if not call.attribute("allowzero", 0):
        for axis, size in enumerate(sizes):
            if not isinstance(size, fx.Proxy) and size == 0:
                sizes[axis] = call.graph.size(value, axis, call.node.input[0])
    return call.method("reshape", value, tuple(sizes))


@operator("Flatten")
def _flatten(call: Call) -> Value:
    value, axis = call.inputs[0], call.attribute("axis", 1)
    axis += call.rank() if axis < 0 else 0
    if axis == 0:
        return call.method("reshape", value, (1, -1))
    if axis == call.rank():
        return call.method("reshape", value, (-1, 1))
    value = call.emit(torch.flatten, value, axis)
    return value if axis == 1 else call.emit(torch.flatten, value, 0, axis - 1)


@operator("Transpose")
def _transpose(call: Call) -> Value:
    order = tuple(call.attribute("perm", reversed(range(call.rank()))))
    found = call.method("permute", call.inputs[0], order)
    return call.graph.named(found, call.inputs[0]) if is_constant(found) else found


@operator("Squeeze")
def _squeeze(call: Call) -> Value:
    value = call.inputs[0]
    axes = call.setting("axes", 1)
    if axes is None:
        axes = [axis for axis, size in enumerate(example_of(value).shape) if size == 1]
    for axis in sorted((call.axis(axis) for axis in axes), reverse=True):
        value = call.emit(torch.squeeze, value, axis)
    return value


@operator("Unsqueeze")
def _unsqueeze(call: Call) -> Value:
    value, axes = call.inputs[0], call.setting("axes", 1)
    final = rank(value) + len(axes)
    for axis in sorted(axis % final for axis in axes):
        value = call.emit(torch.unsqueeze, value, axis)
    return value


@operator("Concat")
def _concat(call: Call) -> Value:
    parts = [value for value in call.inputs if tuple(example_of(value).shape) != (0,)] or list(call.inputs[:1])
    return parts[0] if len(parts) == 1 else call.emit(torch.cat, parts, call.attribute("axis"))


@operator("Split")
def _split(call: Call) -> list[Value]:
    value, axis = call.inputs[0], call.axis(call.attribute("axis", 0))
    sizes = call.setting("split", 1)
    count = len(call.node.output)
    if sizes is None:
        length = example_of(value).shape[axis]
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
    size = example_of(value).shape[axis]
    first = min(start, size - 1) if start >= 0 else start + size
    last = end if end >= 0 else max(end + size, -1)
    return call.emit(torch.flip, value, (axis,)), size - 1 - first, size - 1 - last, -step


@operator("Gather")
def _gather(call: Call) -> Value:
    value, index = call.inputs
    axis = call.axis(call.attribute("axis", 0))
    if (
        is_constant(value)
        and value.ndim == 2
        and axis == 0
        and value.is_floating_point()
        and isinstance(index, fx.Proxy)
    ):
        layer = nn.Embedding(value.shape[0], value.shape[1], device="meta")
        return call.layer(layer, "embedding", {"weight": value}, call.method("to", index, torch.int64))
    if is_constant(index) and index.ndim == 0:
        return call.emit(torch.select, value, axis, int(index))
    if isinstance(index, Numbers) and not index.shape:
        return call.emit(torch.select, value, axis, index.items[0])
    if is_constant(index) and index.ndim == 1:
        size = example_of(value).shape[axis]
        return call.emit(torch.index_select, value, axis, torch.where(index < 0, index + size, index))
    index = call.method("to", call.graph.tensor(index), torch.int64)
    return call.emit(python.getitem, value, (*[slice(None)] * axis, index))


@operator("GatherElements")
def _gather_elements(call: Call) -> Value:
    axis = call.axis(call.attribute("axis", 0))
    return call.emit(torch.gather, call.inputs[0], axis, _from_front(call, call.inputs[0], call.inputs[1], axis))


def _from_front(call: Call, value: Value, index: Value, axis: int) -> Value:
    """Indices counted from the front: ONNX allows negative ones, and torch.gather does not."""
    index = call.method("to", index, torch.int64)
    if is_constant(index):
        return torch.where(index < 0, index + example_of(value).shape[axis], index)
    return index


@operator("GatherND")
def _gather_nd(call: Call) -> Value:
    value, index = call.inputs
    batch = call.attribute("batch_dims", 0)
    depth = example_of(index).shape[-1]
    parts = [call.emit(torch.select, index, -1, place) for place in range(depth)]
    if not batch:
        return call.emit(python.getitem, value, tuple(parts))
    sizes = example_of(index).shape
    places = []
    for axis in range(batch):
        steps = torch.arange(sizes[axis]).reshape([-1 if a == axis else 1 for a in range(len(sizes) - 1)])
        places.append(steps)
    return call.emit(python.getitem, value, (*places, *parts))


@operator("ScatterND")
def _scatter_nd(call: Call) -> Value:
    value, index, updates = call.inputs
    reduction = call.attribute("reduction", "none")
    if reduction not in ("none", "add"):
        raise call.refusal(f"reduction {reduction}; allowed: none, add")
    depth = example_of(index).shape[-1]
    parts = tuple(call.emit(torch.select, index, -1, place) for place in range(depth))
    if any(map(is_constant, parts)):
        parts = tuple(call.method("to", part, torch.int64) for part in parts)
    return call.emit(torch.index_put, value, parts, updates, reduction == "add")


@operator("ScatterElements", "Scatter")
def _scatter_elements(call: Call) -> Value:
    value, index, updates = call.inputs
    axis = call.axis(call.attribute("axis", 0))
    reduction = call.attribute("reduction", "none")
    index = _from_front(call, value, index, axis)
    if reduction == "none":
        return call.emit(torch.scatter, value, axis, index, updates)
    names = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
    return call.emit(torch.scatter_reduce, value, axis, index, updates, names[reduction])


@operator("Expand")
def _expand(call: Call) -> Value:
    value, wanted = call.graph.tensor(call.inputs[0]), list(call.graph.sizes(call.inputs[1]))
    own = list(example_of(value).shape)
    extra = len(wanted) - len(own)
    if extra < 0:
        wanted, extra = [*own[:-extra], *wanted], 0
    call.limited(tuple(wanted))
    # ONNX broadcasts both ways: where the wanted size is 1 the tensor's own stays, which torch writes as -1.
    for axis, size in enumerate(own, extra):
        if not isinstance(wanted[axis], fx.Proxy) and wanted[axis] in (1, size):
            wanted[axis] = -1
    if wanted == [-1] * len(own):
        return value
    return call.method("expand", value, tuple(wanted))


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
    n, c, h, w = (call.graph.size(value, axis, call.node.input[0]) for axis in range(4))
    channels = example_of(c) // block**2
    split = call.method("reshape", value, (n, block, block, channels, h, w))
    moved = call.method("permute", split, (0, 3, 4, 1, 5, 2))
    high, wide = (_product(call, size, block) for size in (h, w))
    return call.method("reshape", moved, (n, channels, high, wide))


@operator("SpaceToDepth")
def _space_to_depth(call: Call) -> Value:
    value, block = call.inputs[0], call.attribute("blocksize")
    n, _, h, w = (call.graph.size(value, axis, call.node.input[0]) for axis in range(4))
    channels = example_of(value).shape[1]
    high, wide = (_quotient(call, size, block) for size in (h, w))
    split = call.method("reshape", value, (n, channels, high, block, wide, block))
    return call.method(
        "reshape", call.method("permute", split, (0, 3, 5, 1, 2, 4)), (n, channels * block**2, high, wide)
    )


def _product(call: Call, size: Number, factor: int) -> Number:
    return call.emit(python.mul, size, factor) if isinstance(size, fx.Proxy) else size * factor


def _quotient(call: Call, size: Number, factor: int) -> Number:
    return call.emit(python.floordiv, size, factor) if isinstance(size, fx.Proxy) else size // factor


@operator("NonZero")
def _non_zero(call: Call) -> Value:
    return call.method("t", call.emit(torch.nonzero, call.inputs[0]))


@operator("OneHot")
def _one_hot(call: Call) -> Value:
    index, values = call.inputs[0], call.constant(2, "values")
    depth = int(call.constant(1, "depth").item())
    axis = call.attribute("axis", -1)
    steps = torch.arange(call.limited((depth,))[0])
    index = call.method("to", index, torch.int64)
    index = call.emit(torch.where, call.emit(torch.lt, index, 0), call.emit(torch.add, index, depth), index)
    final = call.rank() + 1
    hot = call.emit(
        torch.eq,
        call.emit(torch.unsqueeze, index, axis % final),
        steps.reshape([-1 if a == axis % final else 1 for a in range(final)]),
    )
    return call.emit(torch.where, hot, values[1], values[0])


@operator("GridSample", first=16)
def _grid_sample(call: Call) -> Value:
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(
        call.attribute("mode", "bilinear"), call.attribute("mode", "bilinear")
    )
    padding = call.attribute("padding_mode", "zeros")
    return call.emit(F.grid_sample, *call.inputs, mode, padding, bool(call.attribute("align_corners", 0)))
