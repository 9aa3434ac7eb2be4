"""Rewrites a QDQ graph into the node units that Qualcomm's HTP runs in integers.

A unit has a DequantizeLinear before every input and a QuantizeLinear after its output; an op with a float input or
output runs in half precision, if at all. So, measured in the simulator of onnxruntime-qnn 2.7:

- an op that moves quantized numbers gets a pair of its own behind it, on the same grid;
- constants of sums and products are stored in the integers of the other operand: one number keeps its value;
- the factors of a norm are stored as uint8 and its shifts as int32, the factors of a PRelu like its input;
- a looked-up table is stored on the grid of its result.
"""

from __future__ import annotations

from typing import Any

from sparsebit.deploy.exporting.qdq import BITS_KEY
from sparsebit.deploy.onnx_graph.ir_values import become, is_single, producer, remove_unread, stored, stored_once
from sparsebit.deploy.onnx_graph.packages import ir, numpy
from sparsebit.deploy.onnx_graph.qdq_graph import DEQUANTIZE, MOVES, QUANTIZE

_MOVES = MOVES | {"Split", "Slice", "Gather", "Pad", "Expand", "Tile", "DepthToSpace", "SpaceToDepth", "MaxPool"}
_BINARY = frozenset({"Add", "Sub", "Mul", "Div", "Max", "Min", "PRelu"})
_NORMS = frozenset({"LayerNormalization", "InstanceNormalization"})
_LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm"})
_LARGEST = 1 << 30


def lay_out_for_htp(model: ir.Model) -> None:
    """Rewrite, in place."""
    for node in list(model.graph):
        if node.op_type == "Gather":
            _store_table(model, node)
    for node in list(model.graph):
        if node.op_type in _MOVES and (grid := _grid(node.inputs[0])) is not None:
            for value in node.outputs:
                _add_pair(model, value, grid)
    for node in list(model.graph):
        if node.op_type in _BINARY:
            _store_operands(model, node)
        elif node.op_type in _NORMS and _grid(node.inputs[0]) is not None:
            for place, kind in ((1, "UINT8"), (2, "INT32")):
                if place < len(node.inputs):
                    _store(model, node, place, kind)


def _grid(value: ir.Value | None) -> ir.Node | None:
    """The DequantizeLinear of one scale, of 8 or 16 bits, that computes the value."""
    node = producer(value, DEQUANTIZE)
    kind = None if node is None or node.inputs[0] is None else node.inputs[0].dtype
    is_activation = kind in (ir.DataType.UINT8, ir.DataType.UINT16, ir.DataType.INT8, ir.DataType.INT16)
    return node if node is not None and is_activation and is_single(node.inputs[1]) else None


def _add_pair(model: ir.Model, value: ir.Value, grid: ir.Node) -> None:
    """Add Q and DQ after a moved value, unless all its readers quantize it. Its numbers are on the grid already."""
    readers = [(reader, place) for reader, place in value.uses() if reader.op_type != QUANTIZE]
    if not readers and not value.is_graph_output():
        return
    codes_before, *parameters = grid.inputs
    assert codes_before is not None and codes_before.dtype is not None and value.name is not None
    note = {key: text for key, text in grid.metadata_props.items() if key == BITS_KEY}
    quantize = ir.node(QUANTIZE, [value, *parameters], name=f"{value.name}/moved/q", metadata_props=note)
    dequantize = ir.node(
        DEQUANTIZE, [quantize.outputs[0], *parameters], name=f"{value.name}/moved/dq", metadata_props=note
    )
    codes = become(quantize.outputs[0], value, f"{value.name}/moved/codes")
    codes.type = ir.TensorType(codes_before.dtype)
    pair, maker = become(dequantize.outputs[0], value, f"{value.name}/moved"), value.producer()
    assert maker is not None
    model.graph.insert_after(maker, [quantize, dequantize])
    for reader, place in readers:
        reader.replace_input_with(place, pair)
    if value.is_graph_output():
        _swap_names(model, value, pair)


def _swap_names(model: ir.Model, value: ir.Value, pair: ir.Value) -> None:
    name, value.name = value.name, pair.name
    pair.name = name
    model.graph.outputs[:] = [pair if output is value else output for output in model.graph.outputs]


def _store_operands(model: ir.Model, node: ir.Node) -> None:
    """Constants of an op with a quantized operand, in that operand's integers."""
    grid = next(filter(None, map(_grid, node.inputs)), None)
    if grid is None or grid.inputs[0] is None or grid.inputs[0].dtype is None:
        return
    kind = grid.inputs[0].dtype.name
    for place in range(len(node.inputs)):
        _store(model, node, place, kind)


def _store(model: ir.Model, node: ir.Node, place: int, kind: str) -> None:
    """The constant at this place as integers of its own range, with a DequantizeLinear."""
    value = node.inputs[place]
    numbers = stored(value)
    if value is None or numbers is None or numbers.dtype.name != "float32" or not numbers.size:
        return
    scale, zero_point = _range_of(numbers, kind)
    dtype = ir.DataType[kind]
    ends = numpy.iinfo(dtype.numpy())
    codes = numpy.clip(numpy.rint(numbers / scale) + zero_point, ends.min, ends.max)
    name = f"{value.name}/{kind.lower()}"
    arrays = {"codes": (codes, dtype), "scale": (scale, ir.DataType.FLOAT), "zero_point": (zero_point, dtype)}
    inputs = [
        stored_once(model, f"{name}/{part}", numpy.asarray(array).astype(one.numpy()), one)
        for part, (array, one) in arrays.items()
    ]
    dequantize = ir.node(DEQUANTIZE, inputs, name=f"{node.name}/{name}/dq")
    model.graph.insert_before(node, dequantize)
    node.replace_input_with(place, become(dequantize.outputs[0], value, f"{node.name}/{name}"))


def _range_of(numbers: Any, kind: str) -> tuple[Any, Any]:
    """Scale and zero point: one number is the last code, so that it keeps its value; int32 leaves room for a sum."""
    low, high = min(float(numbers.min()), 0.0), max(float(numbers.max()), 0.0)
    if kind == "INT32":
        return numpy.float32(max(-low, high, 1e-6) / _LARGEST), 0
    ends = numpy.iinfo(ir.DataType[kind].numpy())
    if high == low:
        return numpy.float32(1.0), 0
    scale = numpy.float32((high - low) / (int(ends.max) - int(ends.min)))
    return scale, int(numpy.clip(round(int(ends.min) - low / float(scale)), ends.min, ends.max))


def _store_table(model: ir.Model, gather: ir.Node) -> None:
    """Gather(table) + Q + DQ -> Gather(DQ(table's codes)) + Q + DQ on one grid: rounding commutes with a look-up."""
    readers = [reader for reader, _ in gather.outputs[0].uses()]
    quantize = readers[0] if len(readers) == 1 and readers[0].op_type == QUANTIZE else None
    dequantize, numbers = producer(gather.inputs[0], DEQUANTIZE), stored(gather.inputs[0])
    if dequantize is not None:
        numbers = _dequantized(dequantize)
    if quantize is None or numbers is None or numbers.dtype.name != "float32" or not is_single(quantize.inputs[1]):
        return
    scale, zero_point = (stored(value) for value in quantize.inputs[1:3])
    ends = numpy.iinfo(zero_point.dtype)
    codes = numpy.clip(numpy.rint(numbers / scale) + zero_point.astype("int64"), ends.min, ends.max)
    name = f"{gather.name}/table"
    table = stored_once(model, f"{name}/codes", codes.astype(zero_point.dtype))
    new = ir.node(DEQUANTIZE, [table, *quantize.inputs[1:3]], name=f"{name}/dq")
    output = new.outputs[0]
    output.name, output.type, output.shape = name, ir.TensorType(ir.DataType.FLOAT), table.shape
    model.graph.insert_before(gather, new)
    gather.replace_input_with(0, output)
    if dequantize is not None:
        remove_unread(model, dequantize)


def _dequantized(node: ir.Node) -> Any:
    """The result of a DequantizeLinear of a stored tensor; None if its input is computed, or has blocks."""
    codes, scale = stored(node.inputs[0]), stored(node.inputs[1])
    if codes is None or scale is None or "block_size" in node.attributes:
        return None
    zero_point = stored(node.inputs[2]) if len(node.inputs) > 2 else numpy.zeros(())
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 1
    along = [-1 if dim == axis % codes.ndim else 1 for dim in range(codes.ndim)] if scale.size > 1 else ()
    shift = numpy.reshape(zero_point.astype("float32"), along if zero_point.size > 1 else ())
    return (codes.astype("float32") - shift) * numpy.reshape(scale, along)
