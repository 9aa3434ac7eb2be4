"""Where each channel of a tensor is after an op: the op itself is run on labels instead of values.

A label tensor has the shape of the values and holds, at each place, the number of the channel that a scale there
belongs to; -1 if there is no scale. Ops that only move values are run on the labels, so that nothing about views,
splits or head layouts is assumed. Ops that compute keep a label if a positive factor on their input is a factor on
their output.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from sparsebit.graph.ops.op_rows import ROWS, OpRow
from sparsebit.graph.ops.op_table import keeps_grid, row_of, tensor_arguments
from sparsebit.graph.passes.fold_batchnorm import is_intercepted
from sparsebit.graph.values.nested import tensors_of
from sparsebit.quantization.building.inserted_factors import ChannelFactor
from sparsebit.quantization.ops.quant_opr import GatedQuantOpr, QIdentity, QShared, QuantOpr

NONE = -1  # the label of a place that no scale of the channels reaches

_MOVES = frozenset({"flatten", "unflatten", "reshape", "chunk", "expand", "permute", "squeeze", "roll", "getitem"})
_HOMOGENEOUS = frozenset({"relu", "leaky_relu", "prelu", "neg", "identity", "dropout"})
_WINDOWED = frozenset({"max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "upsample", "pad"})
_PRODUCTS = frozenset({"matmul", "bmm"})
_CLIPS = frozenset({"relu6", "hardtanh", "clamp"})
_IDENTITY = next(row for row in ROWS if row.name == "identity")


class Refused(Exception):
    """A scale on the op's input does not become one on its output; the message explains why."""


@dataclass(frozen=True)
class Value:
    """The value of a node on an example: a tensor's shape, or a Python value."""

    shape: torch.Size | None
    python: Any = None
    holds_tensors: bool = False  # a tuple or another structure of tensors

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
    if node.op != "call_module":
        return Op(node, row_of(node, root), node.target)
    module = root.get_submodule(str(node.target))
    watched = is_intercepted(module)
    if isinstance(module, (QIdentity, QShared, ChannelFactor)):  # a scale passes all of them
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
    row, node = op.row, op.node
    if op.is_watched:
        raise Refused("a hook or a forward of your own runs there")
    if row is None:
        raise Refused(f"{op.name} is not known to keep a scale per channel")
    if isinstance(op.call, nn.Module) and not _is_torchs(op):
        raise Refused(f"{type(op.call).__name__} has code of its own")
    labelled = [source for source in node.all_input_nodes if source in labels]
    if row.name in _MOVES:
        return _moved(op, labels, values)
    if row.name == "cat":
        return _concatenated(op, labels, values)
    if len(labelled) != 1 and row.name != "attention":
        raise Refused(f"{row.name} reads the channels twice")
    shape = values[node].shape
    if shape is None:
        raise Refused(f"{row.name} returns several values")
    if row.name == "attention":
        return _attended(op, labels, shape)
    (source,) = labelled
    given = labels[source]
    if not isinstance(given, Tensor):
        raise Refused(f"{row.name} reads several tensors")
    if row.name in _HOMOGENEOUS or row.name in _CLIPS:
        return _same(given, shape, row.name)
    if row.name in ("mul", "div"):
        if row.name == "div" and (not node.args or node.args[0] is not source):
            raise Refused("it is divided by the channels")
        return _same(given, shape, row.name)
    if row.name == "mean":
        return _mean(op, given, shape)
    if row.name in _WINDOWED:
        if row.name == "pad" and not keeps_grid(row, node, root):
            raise Refused("it pads with values that are not zero")
        return _windowed(op, given, shape)
    if row.name in _PRODUCTS:
        return _product(op, source, given, shape)
    if row.name in ("add", "sub"):
        raise Refused("another tensor is added, which would have to be scaled alike (a residual sum)")
    raise Refused(f"{row.name} does not keep a factor: f(s x) is not s f(x)")


def scored_by(op: Op) -> list[fx.Node]:
    """The queries and keys of an attention, whose channels are summed over."""
    if op.row is None or op.row.name != "attention":
        return []
    given = dict(zip(("query", "key"), op.node.args, strict=False)) | dict(op.node.kwargs)
    return [node for node in (given.get(name) for name in ("query", "key")) if isinstance(node, fx.Node)]


def clip_bounds(op: Op) -> tuple[float, float] | None:
    """The bounds to which an op clips its input; None for an op that does not clip."""
    if op.row is None or op.row.name not in _CLIPS:
        return None
    if op.row.name == "relu6":
        return 0.0, 6.0
    if isinstance(op.call, nn.Hardtanh):
        return float(op.call.min_val), float(op.call.max_val)
    given = dict(zip(_bound_names(op), op.node.args[1:], strict=False)) | dict(op.node.kwargs)
    low, high = (next((given[name] for name in names if name in given), None) for names in (_LOWS, _HIGHS))
    if op.row.name == "hardtanh":
        low, high = -1.0 if low is None else low, 1.0 if high is None else high
    ends = (float("-inf") if low is None else low), (float("inf") if high is None else high)
    if not isinstance(ends[0], (int, float)) or not isinstance(ends[1], (int, float)):
        return float("nan"), float("nan")  # a tensor
    return float(ends[0]), float(ends[1])


_LOWS, _HIGHS = ("min", "min_val"), ("max", "max_val")


def _bound_names(op: Op) -> Sequence[str]:
    name = str(getattr(op.call, "__name__", op.call))
    return ("max",) if name.startswith("clamp_max") else ("min", "max")


def is_constant_along(labels: Tensor, axis: int) -> bool:
    """Whether all labels along the axis are the same."""
    return bool((labels == labels.narrow(axis, 0, 1)).all()) if labels.shape[axis] else True


def vector_along(labels: Tensor, axis: int) -> Tensor | None:
    """The labels along one axis, if they depend on nothing else; `(size of the axis,)`."""
    axis %= labels.ndim
    if not all(is_constant_along(labels, other) for other in range(labels.ndim) if other != axis):
        return None
    for other in reversed([other for other in range(labels.ndim) if other != axis]):
        labels = labels.select(other, 0)
    return labels.contiguous()


# --- one kind of op each


def _moved(op: Op, labels: dict[fx.Node, Any], values: dict[fx.Node, Value]) -> Any:
    """Run the op on the labels."""

    def real(argument: Any) -> Any:
        if not isinstance(argument, fx.Node):
            return argument
        if argument in labels:
            return labels[argument]
        if values[argument].shape is not None or values[argument].holds_tensors:
            raise Refused(f"{op.name} is steered by another tensor")
        return values[argument].python

    args, kwargs = map_aggregate(op.node.args, real), map_aggregate(op.node.kwargs, real)
    call: Any = op.call
    try:
        moved = getattr(args[0], call)(*args[1:], **kwargs) if isinstance(call, str) else call(*args, **kwargs)
    except Refused:
        raise
    except Exception as error:
        raise Refused(f"{op.name} cannot be followed ({type(error).__name__})") from error
    parts = tensors_of(moved)
    if not parts or any(part.is_floating_point() for part in parts):
        raise Refused(f"{op.name} cannot be followed")
    return moved


def _concatenated(op: Op, labels: dict[fx.Node, Any], values: dict[fx.Node, Value]) -> Tensor:
    arguments = tensor_arguments(op.row, op.node.args, dict(op.node.kwargs)) if op.row is not None else {}
    tensors = next(iter(arguments.values()), ())
    axis = op.node.kwargs.get("dim", op.node.kwargs.get("axis", op.node.args[1] if len(op.node.args) > 1 else 0))
    if not isinstance(tensors, (list, tuple)) or not isinstance(axis, int):
        raise Refused("the concatenation cannot be followed")
    parts = []
    for tensor in tensors:
        shape = values[tensor].shape if isinstance(tensor, fx.Node) else None
        if shape is None:
            raise Refused("the concatenation cannot be followed")
        device = next(found.device for found in labels.values() if isinstance(found, Tensor))
        blank = torch.full((), NONE, dtype=torch.int32, device=device).expand(shape)
        part = labels.get(tensor, blank)
        parts.append(part)
    return torch.cat(parts, axis)


def _attended(op: Op, labels: dict[fx.Node, Any], shape: torch.Size) -> Tensor:
    """`softmax(q k^T) v`: every head channel of `v` is one of the output."""
    names = ("query", "key", "value")
    given = dict(zip(names, op.node.args, strict=False)) | dict(op.node.kwargs)
    value = given.get("value")
    if not isinstance(value, fx.Node) or not isinstance(labels.get(value), Tensor):
        raise Refused("it is a query or a key: scores do not keep a scale per channel")
    found: Tensor = labels[value]
    others = [labels[n] for n in op.node.all_input_nodes if n in labels and n is not value]
    mixed = [other for other in others if isinstance(other, Tensor)]
    own = torch.unique(found)
    if any(bool(torch.isin(other, own[own >= 0]).any()) for other in mixed) or value in (given["query"], given["key"]):
        raise Refused("the same channels are scores and values")
    if not is_constant_along(found, -2):
        raise Refused("its values have other channels at other positions")
    if given.get("enable_gqa") and found.ndim > 2 and found.shape[-3] != shape[-3]:
        found = found.repeat_interleave(shape[-3] // found.shape[-3], -3)
    return found.narrow(-2, 0, 1).expand(shape)


def _same(given: Tensor, shape: torch.Size, name: str) -> Tensor:
    try:
        return given.expand(shape)
    except RuntimeError as error:
        raise Refused(f"{name} changes the shape") from error


def _mean(op: Op, given: Tensor, shape: torch.Size) -> Tensor:
    axes = op.node.kwargs.get("dim", op.node.kwargs.get("axis", op.node.args[1] if len(op.node.args) > 1 else None))
    axes = [axes] if isinstance(axes, int) else axes
    if not isinstance(axes, (list, tuple)) or not all(isinstance(axis, int) for axis in axes):
        raise Refused("the mean over all values mixes the channels")
    places = [int(axis) % given.ndim for axis in axes]
    if not all(is_constant_along(given, axis) for axis in places):
        raise Refused("the mean mixes the channels")
    for axis in sorted(places, reverse=True):
        given = given.narrow(axis, 0, 1) if len(shape) == given.ndim else given.select(axis, 0)
    return given.expand(shape)


def _windowed(op: Op, given: Tensor, shape: torch.Size) -> Tensor:
    """Pools, resampling and padding: windows over the last axes, each channel by itself."""
    if op.name == "pad":
        pads = getattr(op.call, "padding", None) or (
            op.node.args[1] if len(op.node.args) > 1 else op.node.kwargs.get("pad")
        )
        count = len(pads) // 2 if isinstance(pads, (list, tuple)) else given.ndim
    else:
        kind = type(op.call) if isinstance(op.call, nn.Module) else op.call
        digit = re.search(r"([123])d", str(getattr(kind, "__name__", kind)))
        count = int(digit[1]) if digit else given.ndim - 2
    if len(shape) != given.ndim or count > given.ndim:
        raise Refused(f"{op.name} cannot be followed")
    for axis in range(given.ndim - count, given.ndim):
        if not is_constant_along(given, axis):
            raise Refused(f"{op.name} mixes the channels")
        given = given.narrow(axis, 0, 1)
    return _same(given, shape, op.name)


def _product(op: Op, source: fx.Node, given: Tensor, shape: torch.Size) -> Tensor:
    """`a @ b`: the labels of `b` along its last axis, or of `a` along the axis before its last, appear in the
    product.
    """
    places = list(tensor_arguments(op.row, op.node.args, dict(op.node.kwargs)).values()) if op.row is not None else []
    if len(places) != 2 or places.count(source) != 1 or min(given.ndim, len(shape)) < 2:
        raise Refused("the product cannot be followed")
    axis = -1 if places[0] is source else -2  # the one that is summed over
    if not is_constant_along(given, axis):
        raise Refused("the product sums over the channels")
    return _same(given.narrow(axis, 0, 1), shape, op.name)


def _is_torchs(op: Op) -> bool:
    """Whether the module is exactly the class of its row; modules named dropout are identities in eval mode."""
    assert op.row is not None
    if isinstance(op.call, (QIdentity, QShared, ChannelFactor)):
        return True
    if op.row.name == "dropout":
        return not op.call.training
    return type(op.call).__module__.startswith("torch.nn.") and isinstance(op.call, op.row.modules)
