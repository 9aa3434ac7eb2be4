"""`find_pairs`: which layers share the channels of a tensor, so that a factor per channel can be moved between them.

A `ChannelPair` is one source (a linear layer, a convolution, or the scale and shift of a norm) and all the layers that
read its channels. The source's parameters are divided by a factor per channel, those of the readers multiplied by it,
and the model's function stays the same. Pairs are found by following the channels through the graph
(`channel_pairs_rules.py`); nothing depends on names or classes of blocks.

The invariant: a channel is only free if every op that reads it keeps the factor up to a reader that can undo it, and
if the parameters on both sides belong to one layer that is called once. A channel that any other op reads is held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import is_parametrized

from sparsebit.graph.nodes.graph_module import module_of
from sparsebit.graph.ops.op_rows import OpKind
from sparsebit.graph.passes.fold_batchnorm import is_intercepted
from sparsebit.graph.values.nested import tensors_of
from sparsebit.numerics.layer_channels import (
    along_outputs,
    input_sizes,
    largest_by_channel,
    num_dims,
    num_inputs,
    num_outputs,
)
from sparsebit.numerics.rounding.layer_matrix import layer_matrix
from sparsebit.quantization.algorithms.layer_visits import has_one_input
from sparsebit.quantization.algorithms.rescaling.channel_pairs_rules import (
    Op,
    Refused,
    Value,
    carried,
    clip_bounds,
    op_of,
    scored_by,
    vector_along,
)
from sparsebit.quantization.building.inserted_factors import ChannelFactor
from sparsebit.quantization.planning.sites import layer_name

# The parameters of each norm function, by position.
_NORM_FUNCTIONS = {
    "layer_norm": ("input", "normalized_shape", "weight", "bias"),
    "rms_norm": ("input", "normalized_shape", "weight"),
    "group_norm": ("input", "num_groups", "weight", "bias"),
    "instance_norm": ("input", "running_mean", "running_var", "weight", "bias"),
    "batch_norm": ("input", "running_mean", "running_var", "weight", "bias"),
}
_OVER_LAST_AXES = frozenset({"layer_norm", "rms_norm"})
_KEEP_CONSTANTS = frozenset({"relu", "identity", "dropout", "flatten", "reshape", "permute", "squeeze", "getitem"})
# A parameter that is divided, and a function that brings a factor per channel into its shape.
Scaled = tuple[Tensor, Callable[[Tensor], Tensor]]


@dataclass(frozen=True, eq=False)
class Reader:
    """A layer that reads the channels. `channels (in,)`: the channel of each input, -1 for one of another tensor."""

    name: str
    node: fx.Node
    layer: nn.Module
    channels: Tensor

    def factors(self, factor: Tensor) -> Tensor:
        """The factor of each input, 1 for those of other tensors: `(channels,)` -> `(in,)`."""
        channels = self.channels.to(factor.device)
        return torch.where(channels >= 0, factor[channels.clamp_min(0).long()], torch.ones_like(factor[:1]))


class Clip(NamedTuple):
    """An op between the layers that clips to `[low, high]`; `labels`: the channel of each element of its input."""

    node: fx.Node
    low: float
    high: float
    labels: Tensor


@dataclass(frozen=True, eq=False)
class ChannelPair:
    """One source and its readers. `is_free (channels,)`: channels that may be scaled; `reasons`: why others may not.

    `layer`: the source's layer, None for a norm. `divided`: the source's parameters.
    """

    name: str
    layer: nn.Module | None
    divided: tuple[Scaled, ...]
    readers: tuple[Reader, ...]
    is_free: Tensor
    clips: tuple[Clip, ...] = ()
    reasons: dict[str, str] = field(default_factory=dict)
    only_moves: bool = True  # whether only ReLU and moves are in between, so that a constant offset passes unchanged

    @property
    def num_channels(self) -> int:
        return len(self.is_free)

    @property
    def read_sizes(self) -> Tensor:
        """The largest magnitude among the weights that read each channel, `(channels,)` float64."""
        found = torch.zeros(self.num_channels, dtype=torch.float64, device=self.is_free.device)
        for reader in self.readers:
            sizes = input_sizes(reader.layer).double()
            found = torch.maximum(found, largest_by_channel(sizes, reader.channels, self.num_channels))
        return found

    @property
    def reason(self) -> str:
        """Why nothing can be scaled, or not all; "" if everything can."""
        return "; ".join(f"{name}: {why}" for name, why in self.reasons.items())


def find_pairs(root: fx.GraphModule, values: dict[fx.Node, Value]) -> list[ChannelPair]:
    """Every source with its readers, in the order of the graph; `values`: the value of each node on an example."""
    owners = _Owners(root)
    sources = ((node, _source(node, root, values, owners)) for node in root.graph.nodes)
    pairs = (_follow(node, root, values, owners, source) for node, source in sources if source is not None)
    return [pair for pair in pairs if pair.readers or pair.reasons]


def changeable_layers(root: fx.GraphModule) -> list[fx.Node]:
    """Linear layers and convolutions that are called once, and whose weight no other layer uses."""
    owners, found = _Owners(root), []
    for node in root.graph.find_nodes(op="call_module"):
        op = op_of(node, root)
        is_layer = op.row is not None and op.row.kind is OpKind.WEIGHTED and has_one_input(node)
        if is_layer and layer_matrix(op.call) is not None and not owners.why_not(op):
            found.append(node)
    return found


# --- where channels come from


class _Source(NamedTuple):
    """Where channels begin: the parameters to divide, and the channel of each element of the output."""

    layer: nn.Module | None
    divided: tuple[Scaled, ...]
    labels: Tensor  # of the output


def _source(node: fx.Node, root: fx.GraphModule, values: dict[fx.Node, Value], owners: _Owners) -> _Source | None:
    """The node as a source of channels; None if its output cannot be scaled."""
    shape = values[node].shape
    op = op_of(node, root) if node.op in ("call_module", "call_function", "call_method") else None
    if shape is None or op is None or op.row is None or op.is_watched:
        return None
    if op.row.kind is OpKind.WEIGHTED and isinstance(op.call, nn.Module):
        layer = op.call
        if owners.why_not(op) or layer_matrix(layer) is None:
            return None
        weight, bias = layer.get_parameter("weight"), layer._parameters.get("bias")
        divided: list[Scaled] = [(weight, lambda factor: along_outputs(layer, factor))]
        divided += [(bias, lambda factor: factor)] if bias is not None else []
        axis = len(shape) - num_dims(layer) - 1
        return _Source(layer, tuple(divided), _labels(num_outputs(layer), axis, shape, weight.device))
    parameters = _affine(op, owners)
    if not parameters:
        return None
    first = parameters[0]
    scaled: tuple[Scaled, ...] = tuple((p, lambda factor, p=p: factor.reshape(p.shape)) for p in parameters)  # type: ignore[misc]
    if op.row.name in _NORM_FUNCTIONS and op.row.name not in _OVER_LAST_AXES:
        return _Source(None, scaled, _labels(first.numel(), 1, shape, first.device))
    while first.ndim and first.shape[0] == 1:  # (1, 1, C): the leading axes are broadcast
        first = first[0]
    if first.shape != shape[len(shape) - first.ndim :]:
        return None
    labels = torch.arange(first.numel(), dtype=torch.int32, device=first.device).reshape(first.shape)
    return _Source(None, scaled, labels.expand(shape))


def _affine(op: Op, owners: _Owners) -> list[Tensor]:
    """The scale and shift of a norm, or the parameter that a product multiplies; empty if they may not be changed."""
    assert op.row is not None
    node, name = op.node, op.row.name
    if isinstance(op.call, ChannelFactor):
        return [op.call.factor]
    found: list[Tensor | None] = []
    if isinstance(op.call, nn.Module):
        is_norm = name in _NORM_FUNCTIONS and type(op.call).__module__.startswith("torch.nn.")
        own = [op.call._parameters.get(key) for key in ("weight", "bias")]
        if is_norm and own[0] is not None and not owners.why_not(op):
            found = [parameter for parameter in own if parameter is not None]
    elif name in _NORM_FUNCTIONS:
        given = dict(zip(_NORM_FUNCTIONS[name], node.args, strict=False)) | dict(node.kwargs)
        if given.get("weight") is not None:
            sources = [given[key] for key in ("weight", "bias") if given.get(key) is not None]
            found = [owners.parameter_at(source) for source in sources]
    elif name == "mul" and node.op == "call_function":  # the last step of a norm that is written out
        parameters = [p for p in map(owners.parameter_at, node.all_input_nodes) if p is not None]
        found = [*parameters] if len(parameters) == 1 and len(node.all_input_nodes) == 2 else []
    known = [parameter for parameter in found if parameter is not None]
    return known if len(known) == len(found) else []


def _labels(num_channels: int, axis: int, shape: torch.Size, device: torch.device) -> Tensor:
    numbers = torch.arange(num_channels, dtype=torch.int32, device=device)
    return numbers.reshape([-1 if place == axis else 1 for place in range(len(shape))]).expand(shape)


class _Owners:
    """Counts the users of each parameter of a graph: it may be changed if one layer, called once, uses it."""

    def __init__(self, root: fx.GraphModule) -> None:
        self.root = root
        self.calls = Counter(id(module_of(node, root)) for node in root.graph.find_nodes(op="call_module"))
        registries = {id(part._parameters): part._parameters for part in root.modules()}.values()
        self.holders = Counter(_memory(p) for registry in registries for p in registry.values() if p is not None)
        read = (attrgetter(str(node.target))(root) for node in root.graph.find_nodes(op="get_attr"))
        self.reads = Counter(_memory(tensor) for tensor in read if isinstance(tensor, Tensor))

    def why_not(self, op: Op) -> str:
        """Why the parameters of the op's module may not be changed; empty if they may."""
        module, outer = op.call, self.root.get_submodule(str(op.node.target))
        if self.calls[id(outer)] > 1 or op.node.target in self.root.meta.get("shared", ()):
            return "it is called several times"
        if is_intercepted(module) or is_intercepted(outer):
            return "a hook or a forward of your own runs there"
        if is_parametrized(module) or module._parameters.get("weight") is None:
            return "its weight is computed (pruning, a norm of the weight)"
        parameters = [p for p in module._parameters.values() if p is not None]
        if any(self.holders[_memory(p)] > 1 or self.reads[_memory(p)] for p in parameters):
            return "its weight belongs to several layers"
        return ""

    def parameter_at(self, source: Any) -> Tensor | None:
        """The parameter that a node reads, if nothing else reads it."""
        while isinstance(source, fx.Node) and source.op == "call_module" and len(source.users) == 1:
            op = op_of(source, self.root)
            if op.row is None or op.row.name != "identity" or len(source.all_input_nodes) != 1:
                return None
            source = source.all_input_nodes[0]
        if not isinstance(source, fx.Node) or source.op != "get_attr" or len(source.users) != 1:
            return None
        tensor = attrgetter(str(source.target))(self.root)
        if not isinstance(tensor, nn.Parameter) or self.reads[_memory(tensor)] != 1:
            return None
        return tensor if self.holders[_memory(tensor)] <= 1 else None


# --- where channels go


def _follow(
    start: fx.Node, root: fx.GraphModule, values: dict[fx.Node, Value], owners: _Owners, source: _Source
) -> ChannelPair:
    """Follow the source's channels through the graph, to their readers and to ops that hold them."""
    labels: dict[fx.Node, Any] = {start: source.labels}
    count = int(source.labels.max()) + 1 if source.labels.numel() else 0
    is_free = torch.ones(count, dtype=torch.bool, device=source.labels.device)
    readers: list[Reader] = []
    clips: list[Clip] = []
    reasons: dict[str, str] = {}
    reaches_layer = False

    def hold(read: list[Any], where: fx.Node, why: str) -> None:
        """The channels in `read` keep their scale, because the node `where` reads them."""
        held = torch.cat([torch.unique(part) for item in read for part in tensors_of(item)])
        held = held[held >= 0].long()
        if bool(is_free[held].any()):
            reasons[layer_name("", where)] = why
        is_free[held] = False

    for node in root.graph.nodes:  # those before `start` read none of the labels
        read = [labels[before] for before in node.all_input_nodes if before in labels]
        if read and node.op == "output":
            hold(read, node, "it is an output of the model")
        elif read and not (values[node].shape is None and not values[node].holds_tensors):  # a size: a Python value
            try:
                op = op_of(node, root)
                if op.row is not None and op.row.kind is OpKind.WEIGHTED:
                    reaches_layer = True
                    readers.append(_reader(op, read, owners))
                else:
                    labels[node] = carried(op, root, labels, values)
                    for scores in scored_by(op):
                        if scores in labels:
                            hold([labels[scores]], node, "scores of attention do not keep a scale per channel")
                    bounds = clip_bounds(op)
                    if bounds is not None and bounds != (0.0, torch.inf):
                        clips.append(Clip(node, *bounds, read[0]))
            except Refused as refusal:
                hold(read, node, str(refusal))
    if not readers and not reaches_layer:
        reasons = {}  # no layer reads the channels, so there is nothing to report
    moves = all(op_of(node, root).name in _KEEP_CONSTANTS for node in labels if node is not start)
    name, layer, divided = layer_name("", start), source.layer, source.divided
    return ChannelPair(name, layer, divided, tuple(readers), is_free, tuple(clips), reasons, moves)


def _reader(op: Op, read: list[Any], owners: _Owners) -> Reader:
    layer, (labels, *others) = op.call, read
    if others or not isinstance(labels, Tensor) or not has_one_input(op.node):
        raise Refused("it is called with more than its input")
    is_layer = isinstance(layer, nn.Module) and layer_matrix(layer) is not None
    if why := owners.why_not(op) if is_layer else "not a plain linear layer or convolution":
        raise Refused(why)
    channels = vector_along(labels, -1 - num_dims(layer))
    if channels is None or len(channels) != num_inputs(layer):
        raise Refused("its inputs are other channels at other positions")
    return Reader(layer_name("", op.node), op.node, layer, channels)


def _memory(tensor: Tensor) -> int:
    """A key that is equal for parameters that share memory."""
    return tensor.untyped_storage().data_ptr() or id(tensor)
