"""The exported graph as a placement sees it: units that run in integers or in float, and the tensors between them.

A unit is one op with the ops that runtimes fuse into it: a convolution and its ReLU, a matrix product and its bias, the
two ops of a SiLU. Units are found in the traced ONNX graph in which each quantizer is one node. `file` writes a
placement: it removes the quantizers that are left out from a copy, and lowers that as the export does.

Units are numbered by their place in `units`; a placement is the set of places that run in float.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparsebit.deploy.exporting.to_onnx import DOMAIN
from sparsebit.deploy.onnx_graph.qdq_graph import MOVES
from sparsebit.deploy.runtimes import RuntimeProfile
from sparsebit.quantization.exporting.export import lower_onnx
from sparsebit.quantization.planning.sites import split_site

if TYPE_CHECKING:
    import onnx_ir as ir

# Ops that integer kernels absorb directly after a layer.
_JOINED = frozenset({"Relu", "Clip"})
_KINDS = {
    **dict.fromkeys(("Conv", "ConvTranspose"), "convolution"),
    **dict.fromkeys(("Gemm", "MatMul"), "linear"),
    **dict.fromkeys(("Add", "Sum"), "add"),
    "Mul": "product",
    "Concat": "concat",
    **dict.fromkeys(("Sigmoid", "HardSigmoid", "LeakyRelu"), "activation"),
    # Ops that only move values run on integers as well as on floats.
    **dict.fromkeys((*MOVES, "Resize", "Slice", "Split", "Pad", "Gather"), "move"),
    **dict.fromkeys(("AveragePool", "GlobalAveragePool", "ReduceMean", "MaxPool"), "pooling"),
}
_WEIGHTED = ("convolution", "depthwise convolution", "linear")


@dataclass(frozen=True)
class FusedUnit:
    """One op and what is fused into it. `layer`: the layer whose weight it reads; empty for an op without a weight.

    `can_be_integer`: all its inputs are quantized and, except for a linear layer, also its result.
    """

    nodes: tuple[str, ...]
    kind: str
    layer: str
    weights: tuple[str, ...]
    can_be_integer: bool


@dataclass(frozen=True)
class Link:
    """A tensor from one unit to another; -1: an input or output of the model. `sites`: the quantizers it passes."""

    producer: int
    consumer: int
    sites: tuple[str, ...]
    num_elements: int


class TracedGraph:
    """`units` in the order of execution, `links` between them. `owners`: the name of a `QShared` -> its site."""

    def __init__(self, model: ir.Model, opset: int, owners: Mapping[str, str], *, pads_channels: bool) -> None:
        self.model, self.opset, self.owners, self.pads_channels = model, opset, owners, pads_channels
        taken: set[str] = set()
        for place, node in enumerate(model.graph):  # a unique name for each, because times are found by it
            if not node.name or node.name in taken:
                node.name = f"{node.op_type}_{place}"
            taken.add(node.name)
        parts = _Parts(model)
        self.links = tuple(parts.links())
        self.units = tuple(parts.units(self.links))

    def sites_without(self, floats: Iterable[int]) -> frozenset[str]:
        """The sites that are left out if these units run in float: those that no integer unit reads or writes."""
        float_units = set(floats) | {place for place, unit in enumerate(self.units) if not unit.can_be_integer}
        everything: set[str] = set()
        needed: set[str] = set()
        of_units = [({place}, set(unit.weights)) for place, unit in enumerate(self.units)]
        of_links = [({link.producer, link.consumer} - {-1}, set(self._own(link.sites))) for link in self.links]
        for places, sites in [*of_units, *of_links]:
            everything |= sites
            if not places <= float_units:
                needed |= sites
        return frozenset(everything - needed)

    def _own(self, sites: Iterable[str]) -> Iterator[str]:
        """The sites whose scale and zero point these have: the owner's for a `QShared`."""
        return (self.owners.get(site, site) for site in sites)

    def file(self, left_out: Iterable[str], profile: RuntimeProfile) -> bytes:
        """The model without these sites, as the export would write it."""
        import onnx_ir as ir

        gone = set(left_out)
        model = self.model.clone()
        for node in [node for node in model.graph if _is_site(node)]:
            (site,) = self._own([_tag(node)])
            if site in gone or _is_bias_of(site, gone, node):
                first = node.inputs[0]
                assert first is not None
                node.outputs[0].replace_all_uses_with(first, replace_graph_outputs=True)
                model.graph.remove(node, safe=True)
        lower_onnx(model, profile, self.opset, pads_channels=self.pads_channels)
        return bytes(ir.to_proto(model).SerializeToString())


def _is_site(node: ir.Node) -> bool:
    return node.domain == DOMAIN


def _tag(node: ir.Node) -> str:
    return str(node.attributes["tag"].value)


def _producer(node: ir.Node) -> ir.Node | None:
    """The op that computes the node's first input."""
    return node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None


def _is_bias_of(tag: str, gone: set[str], node: ir.Node) -> bool:
    """Whether the site is a bias that stays float: only quantized layers with quantized inputs add it in integers."""
    layer, role = tag.rpartition(".")[::2]
    sources = [_producer(user) for user, _ in node.outputs[0].uses()]
    reads_float = any(source is None or (_is_site(source) and _tag(source) in gone) for source in sources)
    return role == "bias" and (f"{layer}.weight" in gone or reads_float)


class _Parts:
    """Joins the nodes of the graph to units. `joined`: a node -> the node that it is fused into, or itself."""

    def __init__(self, model: ir.Model) -> None:
        self.graph = model.graph
        self.outputs = set(model.graph.outputs)
        self.moving = self._moving()
        self.joined = {node: node for node in self.moving if not _is_site(node)}
        for node in self.joined:
            self._join(node)
        heads = [node for node in self.joined if self._head(node) is node]
        self.place = {head: place for place, head in enumerate(heads)}
        self.members: dict[ir.Node, list[ir.Node]] = defaultdict(list)
        for node in self.joined:
            self.members[self._head(node)].append(node)

    def _moving(self) -> dict[ir.Node, None]:
        """The nodes that depend on an input of the model, in order; nodes that compute weights are left out."""
        live = set(self.graph.inputs)
        found: dict[ir.Node, None] = {}
        for node in self.graph:
            if any(value in live for value in node.inputs if value is not None):
                found[node] = None
                live |= set(node.outputs)
        return found

    def _head(self, node: ir.Node) -> ir.Node:
        while self.joined[node] is not node:
            node = self.joined[node]
        return node

    def _join(self, node: ir.Node) -> None:
        """Join an activation, a bias or the second half of a gate to the op before it."""
        for value in node.inputs:
            source = value.producer() if value is not None else None
            if source is None or value is None or source not in self.moving:
                continue
            if _is_site(source):
                if split_site(_tag(source))[1].partition(".")[0] == "gate" and (made := _producer(source)) is not None:
                    self.joined[node] = self._head(made)
                continue
            is_only = len(value.uses()) == 1 and value not in self.outputs
            has_constant = any(other is not None and self._is_constant(other) for other in node.inputs)
            is_bias = node.op_type == "Add" and source.op_type == "MatMul" and has_constant
            if is_only and (is_bias or node.op_type in _JOINED):
                self.joined[node] = self._head(source)

    def _is_constant(self, value: ir.Value) -> bool:
        producer = value.producer()
        return value not in self.graph.inputs and (producer is None or producer not in self.moving)

    def units(self, links: tuple[Link, ...]) -> Iterator[FusedUnit]:
        reads: dict[int, list[Link]] = defaultdict(list)
        writes: dict[int, list[Link]] = defaultdict(list)
        for link in links:
            reads[link.consumer].append(link)
            writes[link.producer].append(link)
        for head, place in self.place.items():
            nodes = self.members[head]
            weights = tuple(dict.fromkeys(tag for node in nodes for tag in self._weights(node)))
            kind = self._kind(head)
            is_read = bool(reads[place]) and all(link.sites for link in reads[place])
            is_written = kind == "linear" or all(link.sites for link in writes[place])
            has_weights = bool(weights) or kind not in _WEIGHTED
            layer = split_site(weights[0])[0] if weights else ""
            can_be_integer = kind != "other" and is_read and is_written and has_weights
            yield FusedUnit(tuple(str(node.name) for node in nodes), kind, layer, weights, can_be_integer)

    def _weights(self, node: ir.Node) -> Iterator[str]:
        for value in node.inputs:
            source = value.producer() if value is not None else None
            while source is not None and source not in self.moving:
                if _is_site(source) and not _tag(source).endswith(".bias"):
                    yield _tag(source)
                    break
                source = _producer(source)

    def _kind(self, node: ir.Node) -> str:
        kind = _KINDS.get(node.op_type, "other")
        if kind != "convolution":
            return kind
        group = node.attributes["group"].value if "group" in node.attributes else 1
        shape = node.inputs[1].shape if node.inputs[1] is not None else None
        is_depthwise = int(group) > 1 and shape is not None and shape[1] == 1
        return "depthwise convolution" if is_depthwise else "convolution"

    def links(self) -> Iterator[Link]:
        for head, place in self.place.items():
            for node in self.members[head]:
                for value in node.inputs:
                    if value is None or self._is_constant(value):
                        continue
                    sites, source = _through_sites(value)
                    producer = source.producer()
                    made = -1 if producer is None else self.place[self._head(producer)]
                    if made != place:
                        yield Link(made, place, sites, _num_elements(source))
        for value in self.outputs:
            sites, source = _through_sites(value)
            producer = source.producer()
            if producer is not None and producer in self.joined:
                yield Link(self.place[self._head(producer)], -1, sites, _num_elements(source))


def _through_sites(value: ir.Value) -> tuple[tuple[str, ...], ir.Value]:
    """The quantizers that a value has passed, the last one first, and the value before them."""
    sites: list[str] = []
    while (node := value.producer()) is not None and _is_site(node) and node.inputs[0] is not None:
        sites.append(_tag(node))
        value = node.inputs[0]
    return tuple(sites), value


def _num_elements(value: ir.Value) -> int:
    if value.shape is None:
        return 0
    return math.prod(size for size in value.shape if isinstance(size, int))
