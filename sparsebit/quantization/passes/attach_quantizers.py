"""A plan becomes modules: ops get wrapped, shared tensors get one quantizer.

One tensor with one config has one quantizer. It sits inside the op when that op alone reads the tensor, else in a
`QIdentity` node of its own. Where the tensor's memory is written in place later, each reader behind the write has its
quantizer where it reads: a quantizer makes a copy, which no write reaches.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from sparsebit.config.schema import ActivationConfig, TensorConfig, WeightConfig
from sparsebit.deploy.runtimes import PROFILES
from sparsebit.graph.capture import Captured, Region
from sparsebit.graph.hidden_writes import code_may_write
from sparsebit.graph.op_rows import OpKind, OpRow
from sparsebit.graph.op_table import keeps_grid, row_of
from sparsebit.graph.rewrite import insert_module_after, insert_module_before
from sparsebit.numerics.spec import PerTensor, TensorSpec, num_rows
from sparsebit.quantization.observers import observer_options
from sparsebit.quantization.observers.ranges import ema_ratio
from sparsebit.quantization.ops.layer_call import at_rest
from sparsebit.quantization.ops.quant_opr import (
    FunctionalWeightedQuantOpr,
    GatedQuantOpr,
    QIdentity,
    QShared,
    QuantOpr,
    WeightedQuantOpr,
)
from sparsebit.quantization.passes.divisors import divisor_makers, reads_as_divisor
from sparsebit.quantization.passes.writes import Writes
from sparsebit.quantization.placement import Plan, RegionPlan, feature_axis, layer_name, spec_of
from sparsebit.quantization.quantizers.base import Quantizer, Target
from sparsebit.quantization.quantizers.registration import build_quantizer, quantizer_options


def attach_quantizers(captured: Captured, plan: Plan, backend: str) -> None:
    """Put every planned quantizer into the captured model, in place."""
    maker = _Maker(backend)
    writes_outside = code_may_write(captured.model)
    for path, region in captured.regions.items():
        _RegionAttacher(path, region, plan.regions[path], maker, writes_outside=bool(path) and writes_outside).attach()
    for path, loose in captured.loose.items():
        planned = plan.loose.get(path)
        if planned is not None:
            wrapped = maker.wrap(loose.module, planned.row, path, planned.input, planned.weight)
            loose.parent._modules[loose.name] = wrapped
            if writes_outside and _read_copy not in wrapped._forward_pre_hooks.values():
                wrapped.register_forward_pre_hook(_read_copy, with_kwargs=True)


def _read_copy(layer: QuantOpr, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let a layer's quantizer read a copy, where code that is no graph may write into what it has read."""
    if not torch.is_grad_enabled() or not layer.input_quantizer.is_enable:
        return None
    return pytree.tree_map_only(Tensor, Tensor.clone, (args, kwargs))


@dataclass
class _Group:
    """One tensor (`source`) under one config, and everyone who reads it so; `num_writes` into it were before."""

    source: fx.Node
    config: ActivationConfig
    num_writes: int = 0
    consumers: list[fx.Node] = field(default_factory=list)
    is_output: bool = False


class _RegionAttacher:
    def __init__(self, path: str, region: Region, plan: RegionPlan, maker: _Maker, *, writes_outside: bool) -> None:
        """`writes_outside`: whether code around the region may write into its inputs after it has run."""
        self.path, self.plan, self.maker = path, plan, maker
        self.root = region.graph_module
        self.calls = Counter(node.target for node in self.root.graph.nodes if node.op == "call_module")
        self.rows = {node: row for node in self.root.graph.nodes if (row := row_of(node, self.root)) is not None}
        self.quantized_outputs: dict[fx.Node, fx.Node] = {}
        self.outputs: dict[fx.Node, tuple[Quantizer, ActivationConfig]] = {}  # the first one, of each quantized output
        self.before: dict[fx.Node, fx.Node] = {}  # quantizing node -> the node whose output it quantizes
        # The quantizers in front of an op, which others may read too, by the names that a user is told.
        self.served: dict[fx.Node, dict[str, Quantizer]] = {}
        self.homes = _homes(self.root, region.source)
        self.writes = Writes(self.root, outside=writes_outside)
        self.divisor_makers = divisor_makers(self.root.graph, self.rows)

    def attach(self) -> None:
        inside: dict[fx.Node, ActivationConfig] = {}
        for group in self._groups():
            owner = None if group.is_output else self._owner(group)
            if owner is not None:
                self._share(group, owner)
            elif self._fits_inside(group):
                inside[group.consumers[0]] = group.config
            else:
                self._stand_alone(group)
        taught = [node for node in self.plan.inputs if self.rows[node].implementation is not None]
        for node in inside:
            for source in self.plan.inputs[node]:
                if self.writes.any_behind(node, source):
                    self._copy_for(node, source)
        for node in dict.fromkeys([*inside, *self.plan.weights, *taught, *self.plan.gates]):
            self._wrap(node, self.rows[node], inside.get(node), self.plan.weights.get(node))
        for node, others in self.served.items():
            module = self.root.get_submodule(str(node.target)) if node.op == "call_module" else None
            if isinstance(module, QuantOpr) and module.input_quantizer.fake_fused:
                module.input_quantizer.replaced_by.update(others)
        self.root.graph.lint()
        self.root.recompile()

    def _groups(self) -> list[_Group]:
        """Outputs first: who wants such a tensor in another format reads it quantized, as it would in the runtime."""
        groups: dict[tuple[Any, ...], _Group] = {}

        def group_of(source: fx.Node, config: ActivationConfig, num_writes: int) -> _Group:
            key = (*_group_key(source, config), num_writes)
            return groups.setdefault(key, _Group(source, config, num_writes))

        for node, config in self.plan.outputs.items():
            if not self.writes.any_after(node):
                group_of(node, self._readers_config(node) or config, 0).is_output = True
        for consumer, sources in self.plan.inputs.items():
            for source, config in sources.items():
                group_of(source, config, self.writes.num_before(consumer, source)).consumers.append(consumer)
        return list(groups.values())

    def _readers_config(self, node: fx.Node) -> ActivationConfig | None:
        """What all readers of a quantized output want, in its number format: rounded once, to the readers' grid.

        Two roundings in a row to one type are merged by ONNX Runtime into a third one.
        """
        wanted = [self.plan.inputs.get(reader, {}).get(node) for reader in node.users]
        first = wanted[0] if wanted else None
        if first is None or any(one is None or _group_key(node, one) != _group_key(node, first) for one in wanted):
            return None
        return first if _group_key(node, first)[1] == _group_key(node, self.plan.outputs[node])[1] else None

    def _owner(self, group: _Group) -> Quantizer | None:
        """The quantizer on whose grid the tensor lies already, with the format that the group wants."""
        node = group.source
        while node not in self.outputs:
            row = self.rows.get(node)
            sources = node.all_input_nodes
            if row is None or self.writes.any_after(node) or not keeps_grid(row, node, self.root) or not sources:
                return None
            node = self.before.get(sources[0], sources[0])
        quantizer, config = self.outputs[node]
        is_same = node is not group.source and _group_key(node, config)[1:] == _group_key(node, group.config)[1:]
        return quantizer if is_same else None

    def _share(self, group: _Group, owner: Quantizer) -> None:
        consumers = group.consumers
        single = f"{layer_name(self.path, consumers[0])}.input"
        site = single if len(consumers) == 1 else f"{layer_name(self.path, group.source)}.shared"
        name = self._free_name(site.removeprefix(f"{self.path}.").replace(".", "_"))
        node = insert_module_after(self.root, group.source, name, QShared(self.maker.free_site(site), owner))
        for consumer in consumers:
            consumer.replace_input_with(group.source, node)
            self.served.setdefault(consumer, {})[owner.name] = owner

    def _fits_inside(self, group: _Group) -> bool:
        if group.is_output or len(group.consumers) != 1:
            return False
        consumer = group.consumers[0]
        if self.rows[consumer].kind is OpKind.MULTI:
            return False
        return consumer.op != "call_module" or self.calls[consumer.target] == 1

    def _stand_alone(self, group: _Group) -> None:
        source = layer_name(self.path, group.source)
        if group.is_output:
            site = f"{source}.output"
        elif len(group.consumers) == 1:
            consumer = group.consumers[0]
            site = f"{layer_name(self.path, consumer)}.input.{list(self.plan.inputs[consumer]).index(group.source)}"
        else:
            site = f"{source}.shared"
        before = self.quantized_outputs.get(group.source, group.source)
        readers = [r for r in before.users if not self._divides_by(before, r)] if group.is_output else group.consumers
        name = self._free_name(site.removeprefix(f"{self.path}.").replace(".", "_"))
        quantizer = self.maker.feature(site, group.config)
        if group.num_writes:
            first = self.writes.first(group.consumers)
            node = insert_module_before(self.root, first, before, name, QIdentity(quantizer))
            is_written = self.writes.any_behind(first, group.source)
        else:
            node = insert_module_after(self.root, before, name, QIdentity(quantizer))
            is_written = self.writes.any_behind(node, group.source)
        for reader in readers:
            reader.replace_input_with(before, node)
            self.served.setdefault(reader, {})[f"{quantizer.name} (module {name})"] = quantizer
        if is_written:
            self._copy_for(node, before)
        if group.is_output:
            self.quantized_outputs[group.source] = node
            self.outputs.setdefault(group.source, (quantizer, group.config))
            self.before[node] = group.source

    def _divides_by(self, source: fx.Node, reader: fx.Node) -> bool:
        """Whether the reader must not see zeros that rounding has made."""
        return reader in self.divisor_makers or source in reads_as_divisor(reader)

    def _copy_for(self, node: fx.Node, source: fx.Node) -> None:
        """Let a quantizer read a copy of memory that is written later: the backward needs what it has read."""
        with self.root.graph.inserting_before(node):
            copied = self.root.graph.call_method("clone", (source,))
        node.replace_input_with(source, copied)

    def _wrap(
        self, node: fx.Node, row: OpRow, activation: ActivationConfig | None, weight: WeightConfig | None
    ) -> None:
        name = layer_name(self.path, node)
        gate = self.plan.gates.get(node)
        if node.op == "call_module" and (gate is None or self.calls[node.target] == 1):
            module = self.root.get_submodule(str(node.target))
            wrapped = self.maker.wrap(module, row, name, activation, weight, gate)
            for parent, key in self.homes.pop(id(module), ()):
                parent._modules[key] = wrapped
            return
        op: Any = self.root.get_submodule(str(node.target)) if node.op == "call_module" else node.target
        wrapped = self.maker.wrap(op, row, name, activation, weight, gate)
        node.op, node.target = "call_module", self._free_name(node.name)
        self.root.add_submodule(str(node.target), wrapped)

    def _free_name(self, wanted: str) -> str:
        name, number = wanted, 0
        while hasattr(self.root, name):
            number += 1
            name = f"{wanted}_{number}"
        return name


class _Maker:
    """Builds quantizers and wrapped ops; an op that several places share is wrapped once."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.wrapped: dict[int, tuple[Any, QuantOpr]] = {}
        self.names: set[str] = set()

    def wrap(
        self,
        op: Any,
        row: OpRow,
        name: str,
        activation: ActivationConfig | None,
        weight: WeightConfig | None,
        activation_gate: ActivationConfig | None = None,
    ) -> QuantOpr:
        if isinstance(op, QuantOpr):
            return op
        if isinstance(op, nn.Module) and id(op) in self.wrapped:
            return self.wrapped[id(op)][1]
        site = f"{name}.input"
        input_quantizer = self.feature(site, activation) if activation is not None else _off(site, "feature")
        weight_quantizer = self._weight(f"{name}.weight", op, row, weight) if row.kind is OpKind.WEIGHTED else None
        if activation_gate is not None:
            gate = self.feature(f"{name}.gate", activation_gate)
            return GatedQuantOpr(op, row, input_quantizer, gate)
        kind: type[Any] = row.implementation or QuantOpr
        if row.implementation is None and row.kind is OpKind.WEIGHTED:
            kind = WeightedQuantOpr if isinstance(op, nn.Module) else FunctionalWeightedQuantOpr
        wrapped: QuantOpr = kind.new(op, row, input_quantizer, weight_quantizer)
        if isinstance(op, nn.Module):
            wrapped.train(op.training)
            self.wrapped[id(op)] = (op, wrapped)  # the op is held, so that its id stays its own
        return wrapped

    def free_site(self, site: str) -> str:
        """The site's name; of a layer that the model calls twice, the second one's with a number."""
        name, number = site, 1
        while name in self.names:
            number += 1
            name = f"{site}.{number}"
        self.names.add(name)
        return name

    def feature(self, site: str, config: ActivationConfig) -> Quantizer:
        return self._build(site, config, spec_of(config, feature_axis(config)), "feature", 1)

    def _weight(self, site: str, op: Any, row: OpRow, config: WeightConfig | None) -> Quantizer:
        if config is None:
            return _off(site, "weight")
        spec = spec_of(config, row.channel_axis)
        if PROFILES[self.backend].narrow_weights and spec.symmetric and spec.bits == 8:
            spec = spec.replace(narrow=True)
        if not isinstance(op, nn.Module):  # `F.conv2d(x, w)`: w may be computed on the way, from anything
            return self._build(site, config, spec, "weight", 1, observed_as="feature")
        with at_rest(op):
            weight = getattr(op, row.weight or "weight")
        return self._build(site, config, spec, "weight", num_rows(weight.shape, spec.granularity))

    def _build(
        self,
        site: str,
        config: TensorConfig,
        spec: TensorSpec,
        target: Target,
        num_scales: int,
        observed_as: Target | None = None,
    ) -> Quantizer:
        return build_quantizer(
            config.QUANTIZER.TYPE,
            spec,
            target,
            name=self.free_site(site),
            backend=self.backend,
            num_scales=num_scales,
            observer=config.OBSERVER.TYPE,
            observer_options=observer_options(config),
            options=quantizer_options(config),
            ema_ratio=ema_ratio(config),
            observed_as=observed_as,
        )


def weight_quantizer(site: str, config: WeightConfig, spec: TensorSpec, num_scales: int) -> Quantizer:
    """The quantizer of a weight that the runtime reads as float numbers: any format will do."""
    return _Maker("virtual")._build(site, config, spec, "weight", num_scales)


def _off(site: str, target: Target) -> Quantizer:
    quantizer = build_quantizer("uniform", TensorSpec(8, True, PerTensor()), target, name=site)
    quantizer.set_fake_fused()
    return quantizer


def _group_key(source: fx.Node, config: ActivationConfig) -> tuple[fx.Node, TensorSpec, ActivationConfig]:
    return source, spec_of(config, feature_axis(config)), _sharing_key(config)


def _sharing_key(config: ActivationConfig) -> ActivationConfig:
    """The config without what does not touch numbers, so that an add and a conv with the same format share."""
    return ActivationConfig.model_validate(
        {key: value for key, value in config.to_dict(defaults=True).items() if key != "QADD"}
    )


def _homes(*hosts: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Per module (by id), every place in the hosts where it is registered."""
    homes: dict[int, list[tuple[nn.Module, str]]] = {}
    for parent in {id(module): module for host in hosts for module in host.modules()}.values():
        for key, child in parent._modules.items():
            if child is not None:
                homes.setdefault(id(child), []).append((parent, key))
    return homes
