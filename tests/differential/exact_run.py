"""A quantized ONNX file in float64, with the rounding of every site given: what each site should have rounded.

A runtime that differs by one step at a site computes other numbers after it, and is right to. So every judge is
compared with a run whose sites have the judge's own codes: each site is judged by itself, no difference is carried on.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy
import onnx
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from sparsebit.deploy.onnx_graph.qdq_graph import DEQUANTIZE, QUANTIZE, Graph
from sparsebit.deploy.onnx_graph.qdq_graph import attribute as attribute_of

LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_NORMS = ("LayerNormalization", "InstanceNormalization", "GroupNormalization")
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)


@dataclass(frozen=True)
class Grid:
    """Of one QuantizeLinear: broadcast to its input, in float64; `low` and `high` are the codes at the ends."""

    scale: Any
    zero_point: Any
    low: int
    high: int

    def codes(self, position: Any) -> Any:
        return numpy.clip(numpy.rint(position), self.low, self.high)


@dataclass(frozen=True)
class Stretch:
    """The nodes between the sites before it and a site (or an output of the file)."""

    end: str
    ops: frozenset[str]
    sources: frozenset[str]
    nodes: tuple[Any, ...] = field(repr=False)


@dataclass
class Trace:
    """Of one run: what each site rounds, in steps from code 0; the float outputs; every value."""

    positions: dict[str, Any] = field(default_factory=dict)
    grids: dict[str, Grid] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


class ExactFile:
    """A file that can be run in float64. `sites`: the outputs of its activations' QuantizeLinear nodes."""

    def __init__(self, model: Any) -> None:
        self.graph = Graph(model)
        nodes = [node for node in self.graph.nodes if node.op_type == QUANTIZE]
        self.sites = [node.output[0] for node in nodes if not self.graph.is_weight(node.input[0])]
        self.outputs = [value.name for value in model.graph.output]
        self._model = _in_double(model)

    def run(self, inputs: Mapping[str, Any], given: Mapping[str, Any]) -> Trace:
        """`given`: the codes of sites; a site without any rounds by itself."""
        trace = Trace()
        rounding = type("QuantizeLinear", (_Rounding,), {"trace": trace, "given": given})
        feeds = {name: _double(value) for name, value in inputs.items()}
        with warnings.catch_warnings(), numpy.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            runner = ReferenceEvaluator(self._model, new_ops=[rounding, DequantizeLinear, Conv, ConvTranspose])
            trace.values = runner.run(None, feeds, intermediate=True)
        return trace

    @cached_property
    def stretches(self) -> dict[str, Stretch]:
        """By the site or the output that they end at."""
        ends = {site: self.graph.producer[site].input[0] for site in self.sites}
        ends |= {name: name for name in self.outputs if name not in ends}
        return {end: self._stretch(end, value) for end, value in ends.items()}

    def _stretch(self, end: str, value: str) -> Stretch:
        found: dict[str, Any] = {}
        sources = set[str]()
        waiting = [value]
        while waiting:
            node = self.graph.producer.get(waiting.pop())
            if node is None or node.output[0] in found:
                continue
            if node.output[0] in self.sites:
                sources.add(node.output[0])
                continue
            found[node.output[0]] = node
            waiting += [name for name in node.input if name]
        ops = frozenset(node.op_type for node in found.values())
        return Stretch(end, ops, frozenset(sources), tuple(found.values()))

    def magnitude(self, stretch: Stretch, trace: Trace) -> float:
        """The largest number that is added up in a stretch, which a float sum's error is relative to."""
        largest = max((self._summed(node, trace) for node in stretch.nodes), default=0.0)
        for norm in (node for node in stretch.nodes if node.op_type in _NORMS):
            before = self._stretch(stretch.end, norm.input[0]).nodes
            summed = max((self._summed(node, trace) for node in before), default=_largest(trace.values[norm.input[0]]))
            largest = max(largest, summed * _gain(norm, trace))
        return largest

    def _summed(self, node: Any, trace: Trace) -> float:
        names = node.output if node.op_type == DEQUANTIZE else (*node.input, *node.output)  # it reads codes
        values = [trace.values.get(name) for name in names if name]
        largest = [_largest(value) for value in values]
        if node.op_type not in LAYERS:
            return max(largest, default=0.0)
        weight = numpy.abs(values[1])
        sums = [weight.sum(tuple(a for a in range(weight.ndim) if a != axis)).max(initial=0.0) for axis in (0, -1)]
        sums += [weight.sum(tuple(range(2, weight.ndim)) or None).max(initial=0.0) * weight.shape[0]] * (
            weight.ndim > 2
        )
        return max(*largest, largest[0] * float(max(sums)))


class Conv(OpRun):
    """Of torch, since that of the reference evaluator is slow, and its transposed one fails for groups."""

    def _run(self, x: Any, weight: Any, bias: Any = None, **attributes: Any) -> tuple[Any]:  # type: ignore[override]
        dims, given = x.ndim - 2, {name: value for name, value in attributes.items() if value is not None}
        pads = list(given.get("pads", [0] * 2 * dims))
        if given.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
            raise NotImplementedError(f"auto_pad={given['auto_pad']}")
        ends = [pads[axis + side * dims] for axis in reversed(range(dims)) for side in (0, 1)]
        strides, dilations = (tuple(given.get(name, [1] * dims)) for name in ("strides", "dilations"))
        tensors = [torch.from_numpy(numpy.ascontiguousarray(value)) for value in (x, weight)]
        tensors += [torch.from_numpy(bias) if bias is not None else None]
        y = self._product(*tensors, dims, ends, strides, dilations, given)
        return (y.numpy(),)

    def _product(
        self, x: Any, weight: Any, bias: Any, dims: int, ends: list[int], strides: Any, dilations: Any, given: Any
    ) -> Any:
        function = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
        return function(F.pad(x, ends), weight, bias, strides, 0, dilations, given.get("group", 1))


class ConvTranspose(Conv):
    def _product(
        self, x: Any, weight: Any, bias: Any, dims: int, ends: list[int], strides: Any, dilations: Any, given: Any
    ) -> Any:
        function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
        more = tuple(given.get("output_padding", [0] * dims))
        y = function(x, weight, bias, strides, 0, more, given.get("group", 1), dilations)
        return F.pad(y, [-end for end in ends])


class DequantizeLinear(OpRun):
    def _run(
        self, x: Any, scale: Any, zero_point: Any = None, axis: int = 1, block_size: int = 0, **_: Any
    ) -> tuple[Any]:  # type: ignore[override]
        x = x.astype(numpy.float64)
        zero = 0.0 if zero_point is None else _along(x, zero_point.astype(numpy.float64), axis, block_size)
        return ((x - zero) * _along(x, scale.astype(numpy.float64), axis, block_size),)


class _Rounding(OpRun):
    """QuantizeLinear that notes what it rounds, and returns the codes that it was given."""

    op_domain = ""
    trace: Trace
    given: Mapping[str, Any]

    def _run(self, x: Any, scale: Any, zero_point: Any = None, axis: int = 1, **_: Any) -> tuple[Any]:  # type: ignore[override]
        site = self.onnx_node.output[0]
        dtype = numpy.dtype(numpy.uint8) if zero_point is None else zero_point.dtype
        zero = numpy.float64(0) if zero_point is None else _along(x, zero_point.astype(numpy.float64), axis, 0)
        low, high = _ends(dtype)
        grid = Grid(_along(x, scale.astype(numpy.float64), axis, 0), zero, low, high)
        position = x / grid.scale + grid.zero_point
        self.trace.positions[site], self.trace.grids[site] = position, grid
        codes = grid.codes(numpy.nan_to_num(position))
        known = self.given.get(site)
        if known is not None and fits(known.shape, codes.shape):
            codes[tuple(slice(0, size) for size in known.shape)] = known
        return (codes,)


def fits(known: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether the shapes are the same, but for channels that a layout added after the others."""
    is_same = [a == b for a, b in zip(known, shape, strict=False)]
    return len(known) == len(shape) and all(is_same[:1] + is_same[2:]) and known[1:2] <= shape[1:2]


def _along(x: Any, values: Any, axis: int, block: int) -> Any:
    if values.ndim == 0 or values.size == 1:
        return values.reshape(())
    if block:
        return numpy.repeat(values, block, axis)[tuple(slice(0, size) for size in x.shape)]
    return values.reshape([-1 if a == axis % x.ndim else 1 for a in range(x.ndim)])


def _ends(dtype: Any) -> tuple[int, int]:
    import ml_dtypes

    info = ml_dtypes.iinfo(dtype)
    return int(info.min), int(info.max)


def _gain(norm: Any, trace: Trace) -> float:
    """How much larger an error of a norm's input may become: nearly equal numbers are divided by a small deviation."""
    x, scale = (trace.values[name] for name in norm.input[:2])
    kept = attribute_of(norm, "axis", -1) % x.ndim if norm.op_type == "LayerNormalization" else 2
    sizes = (
        (x.shape[0], attribute_of(norm, "num_groups", 1)) if norm.op_type == "GroupNormalization" else x.shape[:kept]
    )
    variance = x.reshape(*sizes, -1).var(-1).min() + attribute_of(norm, "epsilon", 1e-5)
    return float(numpy.abs(scale).max() / numpy.sqrt(variance))


def _largest(value: Any) -> float:
    if not isinstance(value, numpy.ndarray) or value.dtype.kind != "f" or not value.size:
        return 0.0
    return float(numpy.abs(numpy.nan_to_num(value)).max())


def _double(value: Any) -> Any:
    return value.astype(numpy.float64) if value.dtype.kind == "f" else value


def _in_double(model: Any) -> Any:
    """The model with every float tensor, constant and cast in double precision, except the scales (as they are)."""
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    for value in [*copied.graph.input, *copied.graph.output]:
        if value.type.tensor_type.elem_type in _FLOATS:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    del copied.graph.value_info[:]
    for tensor in copied.graph.initializer:
        _widen(tensor)
    for node in copied.graph.node:
        for attribute in node.attribute:
            if attribute.name == "to" and attribute.i in _FLOATS:
                attribute.i = TensorProto.DOUBLE
            if attribute.type == onnx.AttributeProto.TENSOR:
                _widen(attribute.t)
            if attribute.name == "value_float":
                value = numpy.float64(attribute.f)
                attribute.CopyFrom(helper.make_attribute("value", numpy_helper.from_array(numpy.asarray(value))))
    return copied


def _widen(tensor: Any) -> None:
    if tensor.data_type in _FLOATS:
        wide = numpy_helper.from_array(numpy_helper.to_array(tensor).astype(numpy.float64), tensor.name)
        tensor.CopyFrom(wide)
