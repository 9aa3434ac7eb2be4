"""Where each channel of a tensor is after an op: `carried` maps labels of the op's inputs to labels of its output.

A label tensor has the shape of the values, and holds for each element the number of the channel that it belongs to; -1
if it belongs to none. Ops that only move values are run on the labels, so that nothing about views, splits or head
layouts is assumed. Ops that compute keep a label if a positive factor on their input is a factor on their output.
Anything else raises `Refused` with the reason: an unknown op never passes a scale.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from sparsebit.graph.nodes.graph_module import module_of
from sparsebit.graph.ops.op_rows import ROWS, OpRow
from sparsebit.graph.ops.op_table import keeps_grid, row_of, tensor_arguments
from sparsebit.graph.passes.fold_batchnorm import is_intercepted
from sparsebit.graph.values.nested import tensors_of
from sparsebit.quantization.building.inserted_factors import ChannelFactor
from sparsebit.quantization.ops.quant_opr import GatedQuantOpr, QIdentity, QShared, QuantOpr

NONE = -1  # the label of an element that belongs to none of the channels

_MOVES = frozenset({"flatten", "unflatten", "reshape", "chunk", "expand", "permute", "squeeze", "roll", "getitem"})
_WINDOWED = frozenset({"max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "upsample", "pad"})
_PRODUCTS = frozenset({"matmul", "bmm"})
_CLIPS = frozenset({"relu6", "hardtanh", "clamp"})
_ELEMENTWISE = _CLIPS | {"relu", "leaky_relu", "prelu", "neg", "identity", "dropout", "mul", "div"}
_ADDED = "another tensor is added, which would have to be scaled alike (a residual sum)"
_REFUSALS = {
    "add": _ADDED,
    "sub": _ADDED,
    "div": "it is divided by the channels",
    "pad": "it pads with values that are not zero",
}
_PASSED = (QIdentity, QShared, ChannelFactor)  # modules of this package that a scale passes
_IDENTITY = next(row for row in ROWS if row.name == "identity")


class Refused(Exception):
    """A scale on the op's input does not become one on its output; the message explains why."""


@dataclass(frozen=True)
class Value:
    """The value of a node on an example: a tensor's shape, a Python value, or a structure of tensors."""

    shape: torch.Size | None
    python: Any = None
    holds_tensors: bool = False

    @classmethod
    def of(cls, value: Any) -> Value:
        if isinstance(value, Tensor):
            return cls(value.shape)
        return cls(None, holds_tensors=True) if tensors_of(value) else cls(None, value)


@dataclass(frozen=True)
class Op:
    """A node's op without its quantizers. `row` is None for an unknown op."""

    node: fx.Node
    row: OpRow | None
    call: Any  # a module, a function, or the name of a method
    is_watched: bool = False  # a user's hooks run there

    @property
    def name(self) -> str:
        if self.row is not None:
            return self.row.name
        kind = type(self.call) if isinstance(self.call, nn.Module) else self.call
        return str(getattr(kind, "__name__", kind))


def op_of(node: fx.Node, root: fx.GraphModule) -> Op:
    """The op of a node of a graph that has quantizers in it."""
    module = module_of(node, root)
    if module is None:
        return Op(node, row_of(node, root), node.target)
    watched = is_intercepted(module)
    if isinstance(module, _PASSED):
        return Op(node, _IDENTITY, module, watched)
    if isinstance(module, GatedQuantOpr):
        return Op(node, None, module, watched)
    if isinstance(module, QuantOpr):
        watched = watched or (isinstance(module.op, nn.Module) and is_intercepted(module.op))
        return Op(node, None if module.row.implementation is not None else module.row, module.op, watched)
    return Op(node, row_of(node, root), module, watched)


def carried(op: Op, root: fx.GraphModule, labels: dict[fx.Node, Any], values: dict[fx.Node, Value]) -> Any:
    """The labels of the op's output: a tensor, or a tuple of them for an op that splits.

    `labels`: of the preceding nodes that have some. Raises `Refused` if a scale cannot be moved past the op.
    """
    row, node, shape = op.row, op.node, values[op.node].shape
    if op.is_watched or row is None or (isinstance(op.call, nn.Module) and not _is_torchs(op)):
        raise Refused(f"{op.name} is not known to keep a scale per channel, or has a hook or a forward of your own")
    # Moves and concatenations may have several labelled inputs, or several outputs; other ops must have one of each.
    if row.name in _MOVES:
        return _moved(op, labels, values)
    if row.name == "cat":
        return _concatenated(op, labels, values)
    source, *others = [source for source in node.all_input_nodes if source in labels]
    given = labels[source]
    is_single = not others and isinstance(given, Tensor)
    if shape is None or not (is_single or row.name == "attention"):
        raise Refused(f"{row.name} reads the channels twice, or has several values")
    if row.name == "attention":
        return _attended(op, labels, shape)
    is_divisor = row.name == "div" and (not node.args or node.args[0] is not source)  # 1 / (s x) is not s / x
    if row.name in _ELEMENTWISE and not is_divisor:
        return _same(given, shape, row.name)
    if row.name == "mean":
        return _mean(op, given, shape)
    if row.name in _WINDOWED and (row.name != "pad" or keeps_grid(row, node, root)):
        return _windowed(op, given, shape)
    if row.name in _PRODUCTS:
        return _product(op, source, given, shape)
    raise Refused(_REFUSALS.get(row.name, f"{row.name} does not keep a factor: f(s x) is not s f(x)"))


def scored_by(op: Op) -> list[fx.Node]:
    """The queries and keys of an attention: its scores are sums over their channels, which lose the factors."""
    if op.row is None or op.row.name != "attention":
        return []
    given = dict(zip(("query", "key"), op.node.args, strict=False)) | dict(op.node.kwargs)
    return [node for node in (given.get("query"), given.get("key")) if isinstance(node, fx.Node)]


def clip_bounds(op: Op) -> tuple[float, float] | None:
    """The bounds to which an op clips its input; None for an op that does not clip."""
    if op.row is None or op.row.name not in _CLIPS:
        return None
    if op.row.name == "relu6":
        return 0.0, 6.0
    if isinstance(op.call, nn.Hardtanh):
        return float(op.call.min_val), float(op.call.max_val)
    is_above = str(getattr(op.call, "__name__", op.call)).startswith("clamp_max")
    names = ("max",) if is_above else ("min", "max")
    given: dict[str, Any] = {**dict(zip(names, op.node.args[1:], strict=False)), **op.node.kwargs}
    low, high = (given.get(name, given.get(f"{name}_val")) for name in ("min", "max"))
    end = 1.0 if op.row.name == "hardtanh" else torch.inf
    low, high = -end if low is None else low, end if high is None else high
    is_number = isinstance(low, (int, float)) and isinstance(high, (int, float))  # else a tensor
    return (float(low), float(high)) if is_number else (torch.nan, torch.nan)


def vector_along(labels: Tensor, axis: int) -> Tensor | None:
    """The labels along one axis, `(size of the axis,)`; None if they differ along any other axis."""
    others = [other for other in range(labels.ndim) if other != axis % labels.ndim]
    if not all(_is_constant_along(labels, other) for other in others):
        return None
    for other in reversed(others):
        labels = labels.select(other, 0)
    return labels.contiguous()


def _is_constant_along(labels: Tensor, axis: int) -> bool:
    return bool((labels == labels.narrow(axis, 0, 1)).all()) if labels.shape[axis] else True


def _narrowed(labels: Tensor, axis: int, why: str) -> Tensor:
    """The labels with size 1 along the axis. If they differ along it, raises `Refused(why)`."""
    if not _is_constant_along(labels, axis):
        raise Refused(why)
    return labels.narrow(axis, 0, 1)


# --- one function for each kind of op


def _moved(op: Op, labels: dict[fx.Node, Any], values: dict[fx.Node, Value]) -> Any:
    """Run an op that only moves values on the labels."""

    def real(argument: fx.Node) -> Any:
        if argument in labels:
            return labels[argument]
        if values[argument].shape is not None or values[argument].holds_tensors:
            raise Refused(f"{op.name} is steered by another tensor")
        return values[argument].python

    args, kwargs = fx.map_arg((op.node.args, dict(op.node.kwargs)), real)
    try:
        moved = getattr(args[0], op.call)(*args[1:], **kwargs) if isinstance(op.call, str) else op.call(*args, **kwargs)
        parts = tensors_of(moved)
    except Exception as error:
        raise Refused(f"{op.name} cannot be followed ({type(error).__name__})") from error
    if not parts or any(part.is_floating_point() for part in parts):
        raise Refused(f"{op.name} cannot be followed")
    return moved


def _axes(op: Op, default: Any) -> Any:
    given = op.node.args[1] if len(op.node.args) > 1 else default
    return op.node.kwargs.get("dim", op.node.kwargs.get("axis", given))


def _concatenated(op: Op, labels: dict[fx.Node, Any], values: dict[fx.Node, Value]) -> Tensor:
    assert op.row is not None
    tensors = next(iter(tensor_arguments(op.row, op.node.args, dict(op.node.kwargs)).values()), None)
    axis = _axes(op, 0)
    tensors = tensors if isinstance(tensors, (list, tuple)) else [None]
    shapes = [values[tensor].shape if isinstance(tensor, fx.Node) else None for tensor in tensors]
    if None in shapes or not isinstance(axis, int):
        raise Refused("the concatenation cannot be followed")
    device = next(found.device for found in labels.values() if isinstance(found, Tensor))
    blank = torch.full((), NONE, dtype=torch.int32, device=device)
    pairs = zip(tensors, shapes, strict=True)
    return torch.cat(
        [labels[tensor] if tensor in labels else blank.expand(shape or ()) for tensor, shape in pairs], axis
    )


def _attended(op: Op, labels: dict[fx.Node, Any], shape: torch.Size) -> Tensor:
    """`softmax(q k^T) v`: each channel of `v` in a head is the same channel of the output."""
    given = dict(zip(("query", "key", "value"), op.node.args, strict=False)) | dict(op.node.kwargs)
    value = given.get("value")
    found = labels.get(value) if isinstance(value, fx.Node) else None
    if not isinstance(found, Tensor):
        raise Refused("it is a query or a key: scores do not keep a scale per channel")
    mixed = [labels[n] for n in op.node.all_input_nodes if isinstance(labels.get(n), Tensor) and n is not value]
    own = torch.unique(found)
    if any(bool(torch.isin(other, own[own >= 0]).any()) for other in mixed) or value in (given["query"], given["key"]):
        raise Refused("the same channels are scores and values")
    found = _narrowed(found, -2, "its values have other channels at other positions")
    if given.get("enable_gqa") and found.ndim > 2 and found.shape[-3] != shape[-3]:
        found = found.repeat_interleave(shape[-3] // found.shape[-3], -3)
    return found.expand(shape)


def _same(given: Tensor, shape: torch.Size, name: str) -> Tensor:
    try:
        return given.expand(shape)
    except RuntimeError as error:
        raise Refused(f"{name} changes the shape") from error


def _mean(op: Op, given: Tensor, shape: torch.Size) -> Tensor:
    axes = _axes(op, None)
    axes = [axes] if isinstance(axes, int) else axes
    if not isinstance(axes, (list, tuple)) or not all(isinstance(axis, int) for axis in axes):
        raise Refused("the mean over all values mixes the channels")
    ndim = given.ndim
    for axis in sorted((int(axis) % ndim for axis in axes), reverse=True):
        given = _narrowed(given, axis, "the mean mixes the channels")
        given = given if len(shape) == ndim else given.squeeze(axis)
    return given.expand(shape)


def _windowed(op: Op, given: Tensor, shape: torch.Size) -> Tensor:
    """Pools, resampling and padding: windows over the last axes, each channel by itself."""
    if op.name == "pad":
        named = op.node.args[1] if len(op.node.args) > 1 else op.node.kwargs.get("pad")
        pads = getattr(op.call, "padding", None) or named
        count = len(pads) // 2 if isinstance(pads, (list, tuple)) else given.ndim
    else:
        kind = type(op.call) if isinstance(op.call, nn.Module) else op.call
        digit = re.search(r"([123])d", str(getattr(kind, "__name__", kind)))
        count = int(digit[1]) if digit else given.ndim - 2
    if len(shape) != given.ndim or count > given.ndim:
        raise Refused(f"{op.name} cannot be followed")
    for axis in range(given.ndim - count, given.ndim):
        given = _narrowed(given, axis, f"{op.name} mixes the channels")
    return _same(given, shape, op.name)


def _product(op: Op, source: fx.Node, given: Tensor, shape: torch.Size) -> Tensor:
    """`a @ b` has the labels of the columns of `b`, or of the rows of `a`. The axis summed over must have none."""
    places = list(tensor_arguments(op.row, op.node.args, dict(op.node.kwargs)).values()) if op.row is not None else []
    if len(places) != 2 or places.count(source) != 1 or min(given.ndim, len(shape)) < 2:
        raise Refused("the product cannot be followed")
    axis = -1 if places[0] is source else -2  # the one that is summed over
    return _same(_narrowed(given, axis, "the product sums over the channels"), shape, op.name)


def _is_torchs(op: Op) -> bool:
    """Whether the module is one of torch's own classes, whose arithmetic is known; a dropout only in eval mode."""
    assert op.row is not None
    if isinstance(op.call, _PASSED):
        return True
    if op.row.name == "dropout":
        return not op.call.training
    return type(op.call).__module__.startswith("torch.nn.") and isinstance(op.call, op.row.modules)
