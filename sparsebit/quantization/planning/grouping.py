"""Groups the requests of a graph's ops into sites: one tensor in one format has one quantizer.

In: the `Requests` that `plan.py` collected (which op wants which input, output or weight quantized, with which config).
Out: a `RegionPlacement`, which says where each quantizer goes. The quantizer is inside the op if that op alone reads
the tensor, else in a separate node.

The hard part is memory that is written in place between two readers. They read different values of one tensor, so
requests are grouped by the number of writes before the reader, and each group gets its own quantizer where it reads: a
quantizer makes a copy, which a later write does not change.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from sparsebit.config.schema import ActivationConfig, TensorConfig, WeightConfig
from sparsebit.graph.nodes.graph_module import module_of
from sparsebit.graph.ops.op_rows import OpKind, OpRow
from sparsebit.graph.ops.op_table import keeps_grid
from sparsebit.numerics.spec import TensorSpec
from sparsebit.quantization.planning.placement import AloneAt, InsideOf, RegionPlacement, SharedAt
from sparsebit.quantization.planning.sites import activation_axis, layer_name, spec_of
from sparsebit.quantization.planning.writes import Writes


@dataclass
class Requests:
    """The tensors that a graph's ops want quantized, each with its config: `inputs[consumer][source]`, `outputs[op]`, …

    `gates`: ops like `silu` whose inner sigmoid is quantized, too.
    """

    inputs: dict[fx.Node, dict[fx.Node, ActivationConfig]] = field(default_factory=dict)
    outputs: dict[fx.Node, ActivationConfig] = field(default_factory=dict)
    weights: dict[fx.Node, WeightConfig] = field(default_factory=dict)
    gates: dict[fx.Node, ActivationConfig] = field(default_factory=dict)


# Registers a site under a free name, and returns that name: (name, config, axis of the channels).
AddSite = Callable[[str, TensorConfig, int], str]


@dataclass
class _Group:
    """One tensor (`source`) in one format, and all ops that read it so; `num_writes`: earlier writes to its memory."""

    source: fx.Node
    config: ActivationConfig
    num_writes: int
    consumers: list[fx.Node] = field(default_factory=list)
    is_output: bool = False


class Grouping:
    """`place` returns the placement of one graph; `wrapped`: ids of the modules whose sites exist already."""

    def __init__(
        self,
        path: str,
        root: fx.GraphModule,
        rows: dict[fx.Node, OpRow],
        requests: Requests,
        add_site: AddSite,
        free_name: Callable[[str], str],
        wrapped: dict[int, nn.Module],
    ) -> None:
        self.path, self.root, self.rows, self.requests = path, root, rows, requests
        self.add_site, self.free_name, self.wrapped = add_site, free_name, wrapped
        self.calls = Counter(node.target for node in root.graph.nodes if node.op == "call_module")
        self.outputs: dict[fx.Node, tuple[str, ActivationConfig]] = {}  # the first site of each quantized output
        self.writes = Writes(root)

    def place(self) -> RegionPlacement:
        placement = RegionPlacement()
        inside: dict[fx.Node, _Group] = {}
        for group in self._groups():
            owner = None if group.is_output else self._owner(group)
            if owner is not None:
                placement.tensors.append(self._shared(group, owner))
            elif self._fits_inside(group):
                inside[group.consumers[0]] = group
            else:
                placement.tensors.append(self._alone(group))
        # Ops with a registered class are wrapped even if all their quantizers are separate: the class runs the op.
        registered = [node for node in self.requests.inputs if self.rows[node].implementation is not None]
        for node in dict.fromkeys([*inside, *self.requests.weights, *registered, *self.requests.gates]):
            placement.ops.append(self._inside(node, inside.get(node)))
        return placement

    def _groups(self) -> list[_Group]:
        """All requests, grouped by tensor, format and number of earlier writes.

        Outputs come first, and are inserted first: an op that requests another format for a quantized output reads the
        rounded tensor, as in the runtime.
        """
        groups: dict[tuple[Any, ...], _Group] = {}

        def group_of(source: fx.Node, config: ActivationConfig, num_writes: int) -> _Group:
            return groups.setdefault((source, *_format_of(config), num_writes), _Group(source, config, num_writes))

        for node, config in self.requests.outputs.items():
            if not self.writes.any_after(node):
                group_of(node, self._readers_config(node) or config, 0).is_output = True
        for consumer, sources in self.requests.inputs.items():
            for source, config in sources.items():
                group_of(source, config, self.writes.num_before(consumer, source)).consumers.append(consumer)
        return list(groups.values())

    def _readers_config(self, node: fx.Node) -> ActivationConfig | None:
        """The config that all readers of a quantized output request, if its number format is that of the output.

        The output then gets the readers' config, so that the tensor is rounded once, to their grid. ONNX Runtime would
        merge two roundings in a row to the same type into a third one.
        """
        wanted = [self.requests.inputs.get(reader, {}).get(node) for reader in node.users]
        first = wanted[0] if wanted else None
        if first is None or any(one is None or _format_of(one) != _format_of(first) for one in wanted):
            return None
        return first if _format_of(first)[0] == _format_of(self.requests.outputs[node])[0] else None

    def _owner(self, group: _Group) -> str | None:
        """The site whose grid the tensor is on already, if that has the format of the group.

        Followed back through ops that only move values (max pool, reshape) to a quantized output.
        """
        node = group.source
        while node not in self.outputs:
            row = self.rows.get(node)
            moves = row is not None and not self.writes.any_after(node) and keeps_grid(row, node, self.root)
            if not moves or not node.all_input_nodes:
                return None
            node = node.all_input_nodes[0]
        site, config = self.outputs[node]
        return site if node is not group.source and _format_of(config) == _format_of(group.config) else None

    def _shared(self, group: _Group, owner: str) -> SharedAt:
        single = f"{layer_name(self.path, group.consumers[0])}.input"
        name = single if len(group.consumers) == 1 else f"{layer_name(self.path, group.source)}.shared"
        return SharedAt(self.free_name(name), owner, group.source, tuple(group.consumers))

    def _fits_inside(self, group: _Group) -> bool:
        """Whether the quantizer can be inside its op: one reader, called once, with one tensor to quantize."""
        if group.is_output or len(group.consumers) != 1:
            return False
        (consumer,) = group.consumers
        is_called_once = consumer.op != "call_module" or self.calls[consumer.target] == 1
        return is_called_once and self.rows[consumer].kind is not OpKind.MULTI

    def _alone(self, group: _Group) -> AloneAt:
        source = layer_name(self.path, group.source)
        if group.is_output:
            name = f"{source}.output"
        elif len(group.consumers) == 1:
            consumer = group.consumers[0]
            place = list(self.requests.inputs[consumer]).index(group.source)
            name = f"{layer_name(self.path, consumer)}.input.{place}"
        else:
            name = f"{source}.shared"
        site = self.add_site(name, group.config, activation_axis(group.config))
        if group.is_output:
            self.outputs.setdefault(group.source, (site, group.config))
        return AloneAt(site, group.source, tuple(group.consumers), group.num_writes, group.is_output)

    def _inside(self, node: fx.Node, group: _Group | None) -> InsideOf:
        row, layer, gate = self.rows[node], layer_name(self.path, node), self.requests.gates.get(node)
        module = module_of(node, self.root)
        if module is not None and id(module) in self.wrapped:
            return InsideOf(node, row, layer)  # its sites were created at its first place
        if module is not None and (gate is None or self.calls[node.target] == 1):
            self.wrapped[id(module)] = module  # keeps the module alive: a freed one's id could be given to another
        source, config = (None, None) if group is None else (group.source, group.config)
        return with_sites(
            InsideOf(node, row, layer, source), self.add_site, config, self.requests.weights.get(node), gate
        )


def with_sites(
    at: InsideOf,
    add_site: AddSite,
    activation: ActivationConfig | None,
    weight: WeightConfig | None,
    gate: ActivationConfig | None = None,
) -> InsideOf:
    """The op with a site for each config."""
    sites: dict[str, str] = {}
    if activation is not None:
        sites["input"] = add_site(f"{at.layer}.input", activation, activation_axis(activation))
    if weight is not None and at.row.kind is OpKind.WEIGHTED:
        sites["weight"] = add_site(f"{at.layer}.weight", weight, at.row.channel_axis)
    if gate is not None:
        sites["gate"] = add_site(f"{at.layer}.gate", gate, activation_axis(gate))
    return dataclasses.replace(at, **sites)  # type: ignore[arg-type]


def _format_of(config: ActivationConfig) -> tuple[TensorSpec, ActivationConfig]:
    """The number format, and the config without QADD, which does not affect numbers: an add and a conv can share."""
    numbers = {key: value for key, value in config.to_dict().items() if key != "QADD"}
    return spec_of(config, activation_axis(config)), ActivationConfig.model_validate(numbers)
