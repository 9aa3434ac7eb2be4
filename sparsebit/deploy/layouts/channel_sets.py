"""Values of an ONNX graph that have the same channels: channels can be added to all values of a set, or to none.

`channel_sets` joins values node by node (a disjoint-set union by `ChannelSet` objects). Any op that is not known to
treat each channel independently fixes the sets that it touches.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sparsebit.deploy.layouts.stored_convolution import StoredConvolution
from sparsebit.deploy.onnx_graph.packages import ir
from sparsebit.deploy.onnx_graph.qdq_graph import DEQUANTIZE, QUANTIZE

# Ops that compute each channel independently, with the same settings for all; their result for 0 is finite.
_BY_ITSELF = frozenset(
    {QUANTIZE, DEQUANTIZE, "Relu", "Clip", "Sigmoid", "HardSigmoid", "HardSwish", "LeakyRelu", "Elu", "Gelu", "Tanh",
     "Softplus", "Mish", "Cast", "Identity", "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"}
)  # fmt: skip
_OF_SEVERAL = frozenset({"Add", "Sub", "Mul", "Sum"})  # ops that tie the channels of several values


@dataclass
class ChannelSet:
    """Layers: `makers` write the channels, `readers` read them, `through` (depthwise or in groups) do both."""

    values: list[ir.Value] = field(default_factory=list)
    makers: list[StoredConvolution] = field(default_factory=list)
    readers: list[StoredConvolution] = field(default_factory=list)
    through: list[StoredConvolution] = field(default_factory=list)
    is_fixed: bool = False

    @property
    def num_channels(self) -> int:
        return _channels(self.values[0])

    def widen(self, count: int) -> None:
        """Add channels after the others: zero where they are computed, with zero weights where they are read."""
        channels = self.num_channels + count
        for layer in self.makers:
            layer.add_outputs(count)
        for layer in self.readers:
            layer.add_inputs(count)
        for layer in self.through:
            layer.add_groups(count // layer.group_outputs)
        for value in self.values:
            assert value.shape is not None
            value.shape = ir.Shape([value.shape[0], channels, *list(value.shape)[2:]])


def channel_sets(model: ir.Model, layers: list[StoredConvolution]) -> list[ChannelSet]:
    """All sets of the graph; `layers`: its convolutions that can be changed. A set that cannot be widened is fixed."""
    finder = _Finder({id(layer.node): layer for layer in layers})
    for node in model.graph:
        finder.add(node)
    finder.fix(*model.graph.inputs, *model.graph.outputs)
    return list({id(found): found for found in finder.sets.values()}.values())


class _Finder:
    """Joins values, node by node."""

    def __init__(self, layers: dict[int, StoredConvolution]) -> None:
        self._layers = layers
        self.sets: dict[int, ChannelSet] = {}

    def fix(self, *values: ir.Value | None) -> None:
        for value in values:
            if value is not None and _is_image(value):
                self._of(value).is_fixed = True

    def add(self, node: ir.Node) -> None:
        layer = self._layers.get(id(node))
        images = [value for value in (*node.inputs, *node.outputs) if value is not None and _is_image(value)]
        others_are_single = all(value is None or _is_single(value) for value in node.inputs[1:])
        if layer is not None and all(map(_is_image, layer.ends)):
            x, y = layer.ends
            if layer.is_dense:
                self._of(x).readers.append(layer)
                self._of(y).makers.append(layer)
            elif layer.is_square:
                self._join(x, y)
                self._of(x).through.append(layer)
            else:
                self.fix(x, y)
        elif node.op_type in _BY_ITSELF and len(images) == 2 and others_are_single:
            self._join(*images)
        elif not (node.op_type in _OF_SEVERAL and _is_image(node.outputs[0]) and self._joins_several(node)):
            self.fix(*images)

    def _joins_several(self, node: ir.Node) -> bool:
        """Whether every operand has the channels of the result, or is a single number; if so, they are joined."""
        result = node.outputs[0]
        others = [value for value in node.inputs if value is not None and not _is_single(value)]
        if not all(_is_image(value) and _channels(value) == _channels(result) for value in others):
            return False
        for value in others:
            self._join(value, result)
        return True

    def _of(self, value: ir.Value) -> ChannelSet:
        return self.sets.setdefault(id(value), ChannelSet([value]))

    def _join(self, a: ir.Value, b: ir.Value) -> None:
        kept, gone = self._of(a), self._of(b)
        if kept is gone:
            return
        kept.values += gone.values
        kept.makers += gone.makers
        kept.readers += gone.readers
        kept.through += gone.through
        kept.is_fixed |= gone.is_fixed or _channels(a) != _channels(b)
        for value in gone.values:
            self.sets[id(value)] = kept


def _is_image(value: ir.Value) -> bool:
    """Whether the value is computed and has channels: (batch, channels, height, width)."""
    shape = value.shape
    return value.const_value is None and shape is not None and len(shape) == 4 and isinstance(shape[1], int)


def _channels(value: ir.Value) -> int:
    assert value.shape is not None
    return int(value.shape[1])  # type: ignore[arg-type]


def _is_single(value: ir.Value) -> bool:
    """Whether the value is a single number that combines with any shape."""
    shape = value.shape
    return shape is not None and len(shape) < 2 and all(size == 1 for size in shape)
