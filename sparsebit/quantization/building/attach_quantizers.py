"""Inserts the quantizers of a plan into the captured graphs: inside wrapped ops, or alone as a `QIdentity`.

The placement (`planning/placement.py`) says where: `InsideOf` wraps an op into a `QuantOpr` that holds its quantizers,
`AloneAt` inserts a `QIdentity` between a tensor and its readers, `SharedAt` inserts a `QShared`, which marks a tensor
that is on another site's grid already. Layers outside of graphs are replaced in their parent module.

The invariant: a quantizer sees the values that the op would have read. Where memory is written in place later, the
quantizer is inserted after the earlier writes, and reads a copy if a later write could reach what backward needs.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import fx, nn

from sparsebit.config.targets import ACTIVATION, Target
from sparsebit.graph.capture import Captured
from sparsebit.graph.nodes.graph_module import CapturedGraph, module_of
from sparsebit.graph.nodes.hidden_writes import code_may_write
from sparsebit.graph.nodes.value_kinds import copied
from sparsebit.graph.ops.op_rows import OpKind
from sparsebit.graph.ops.op_table import row_of
from sparsebit.graph.region import Region
from sparsebit.graph.rewriting.rewrite import insert_module_after, insert_module_before
from sparsebit.numerics.spec import PerTensor, TensorSpec, num_rows
from sparsebit.quantization.ops.layer_call import side_effect_free_reads
from sparsebit.quantization.ops.quant_opr import (
    FunctionalWeightedQuantOpr,
    GatedQuantOpr,
    QIdentity,
    QShared,
    QuantOpr,
    WeightedQuantOpr,
)
from sparsebit.quantization.planning.divisors import divisor_only_ops, reads_as_divisor
from sparsebit.quantization.planning.masks import SOFTMAX, before_softmax
from sparsebit.quantization.planning.placement import AloneAt, InsideOf, Placement, RegionPlacement, SharedAt
from sparsebit.quantization.planning.sites import Plan, Site
from sparsebit.quantization.planning.writes import Writes
from sparsebit.quantization.quantizers.base import Quantizer, read_copies
from sparsebit.quantization.quantizers.registration import build_quantizer


def attach_quantizers(captured: Captured, plan: Plan, placement: Placement) -> None:
    """Insert every planned quantizer into the captured model, in place; a site that the plan lacks stays in float."""
    builder = _Builder(plan)
    regions = captured.regions
    # Whether any code outside of a region's graph may overwrite a tensor that a quantizer has read.
    writes = code_may_write(captured.model) or any(_writes_behind_code(r.graph_module) for r in regions.values())
    for path, region in regions.items():
        _RegionAttacher(path, region, placement.regions[path], builder, writes_outside=bool(path) and writes).attach()
    for path, loose in captured.loose.items():
        planned = placement.loose.get(path)
        if planned is not None:
            wrapped = builder.wrap(loose.module, planned)
            wrapped.input_quantizer.feeds_softmax |= planned.row.name in SOFTMAX
            loose.parent._modules[loose.name] = wrapped
            if writes:
                read_copies(wrapped.input_quantizer)


def _writes_behind_code(root: CapturedGraph) -> bool:
    """Whether a graph writes into a value that it passed to a module with its own code."""
    nodes = root.graph.find_nodes(op="call_module")
    calls = [node for node in nodes if any(True for _ in root.get_submodule(str(node.target)).children())]
    writes = Writes(root) if calls else None
    reads = ((node, source) for node in calls for source in node.all_input_nodes)
    return writes is not None and any(writes.any_behind(node, source) for node, source in reads)


class _RegionAttacher:
    def __init__(
        self, path: str, region: Region, placement: RegionPlacement, builder: _Builder, *, writes_outside: bool
    ) -> None:
        """`writes_outside`: whether code around the region may write into its inputs after it has run."""
        self.path, self.placement, self.builder = path, placement, builder
        self.root = region.graph_module
        self.calls = Counter(node.target for node in self.root.graph.nodes if node.op == "call_module")
        self.quantized_outputs: dict[fx.Node, fx.Node] = {}  # a node -> the quantizer node after it
        # The separate quantizers before an op, by the names that errors show: its own input quantizer refers to them.
        self.quantizers_before: dict[fx.Node, dict[str, Quantizer]] = {}
        self.homes = _homes(self.root, region.source)
        self.writes = Writes(self.root, outside=writes_outside)
        rows = {node: row for node in self.root.graph.nodes if (row := row_of(node, self.root)) is not None}
        self.divisor_only_ops = divisor_only_ops(self.root.graph, rows)
        self.before_softmax = before_softmax(self.root.graph, rows)

    def attach(self) -> None:
        for tensor in self.placement.tensors:
            if isinstance(tensor, SharedAt):
                self._share(tensor)
            elif tensor.site in self.builder.plan:
                self._insert_identity(tensor)
        for op in self.placement.ops:
            if op.source is not None and op.node is not None and self.writes.any_behind(op.node, op.source):
                self._copy_for(op.node, op.source)
        for op in self.placement.ops:
            self._wrap(op)
        for node, others in self.quantizers_before.items():
            module = module_of(node, self.root)
            if isinstance(module, QuantOpr) and module.input_quantizer.fake_fused:
                module.input_quantizer.replaced_by.update(others)
        self.root.graph.lint()
        self.root.recompile()

    def _share(self, tensor: SharedAt) -> None:
        owner = self.builder.made.get(tensor.owner)
        if owner is None:
            return
        name = self._module_name(tensor.name)
        node = insert_module_after(self.root, tensor.source, name, QShared(tensor.name, owner))
        for reader in tensor.readers:
            reader.replace_input_with(tensor.source, node)
            self.quantizers_before.setdefault(reader, {})[owner.name] = owner

    def _insert_identity(self, tensor: AloneAt) -> None:
        before = self.quantized_outputs.get(tensor.source, tensor.source)
        readers = list(tensor.readers)
        if tensor.is_output:  # every reader gets the rounded output, except divisors: a rounded zero gives infinity
            divides = self.divisor_only_ops
            readers = [r for r in before.users if r not in divides and before not in reads_as_divisor(r)]
        name = self._module_name(tensor.site)
        quantizer = self.builder.activation(tensor.site)
        quantizer.feeds_softmax = not self.before_softmax.isdisjoint(tensor.readers)
        if tensor.num_writes:  # directly before its first reader, so that the earlier writes have happened
            first = self.writes.first(list(tensor.readers))
            node = insert_module_before(self.root, first, before, name, QIdentity(quantizer))
            is_written = self.writes.any_from(first, tensor.source)
        else:
            node = insert_module_after(self.root, before, name, QIdentity(quantizer))
            is_written = self.writes.any_behind(tensor.source, tensor.source)
        for reader in readers:
            reader.replace_input_with(before, node)
            self.quantizers_before.setdefault(reader, {})[f"{quantizer.name} (module {name})"] = quantizer
        if is_written:
            self._copy_for(node, before)
        if tensor.is_output:
            self.quantized_outputs[tensor.source] = node

    def _copy_for(self, node: fx.Node, source: fx.Node) -> None:
        """Let a quantizer read a copy of memory that is written later: the backward needs the values that it read."""
        with self.root.graph.inserting_before(node):
            copy = self.root.graph.call_function(copied, (source,))
        node.replace_input_with(source, copy)

    def _wrap(self, op: InsideOf) -> None:
        node = op.node
        assert node is not None
        module = module_of(node, self.root)
        wrapped = self.builder.wrap(node.target if module is None else module, op)
        wrapped.input_quantizer.feeds_softmax |= node in self.before_softmax
        if module is not None and (op.gate is None or self.calls[node.target] == 1):
            for parent, key in self.homes.pop(id(module), ()):
                parent._modules[key] = wrapped
        else:
            node.op, node.target = "call_module", self._free_name(node.name)
            self.root.add_submodule(str(node.target), wrapped)

    def _module_name(self, site: str) -> str:
        return self._free_name(site.removeprefix(f"{self.path}.").replace(".", "_"))

    def _free_name(self, wanted: str) -> str:
        name, number = wanted, 0
        while hasattr(self.root, name):
            number += 1
            name = f"{wanted}_{number}"
        return name


class _Builder:
    """Builds quantizers and wrapped ops. A module that several nodes call is wrapped once, for all of them."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.made: dict[str, Quantizer] = {}
        self.wrapped: dict[int, tuple[Any, QuantOpr]] = {}

    def wrap(self, op: Any, at: InsideOf) -> QuantOpr:
        if isinstance(op, QuantOpr):
            return op
        is_module, is_weighted = isinstance(op, nn.Module), at.row.kind is OpKind.WEIGHTED
        if is_module and id(op) in self.wrapped:
            return self.wrapped[id(op)][1]
        input_quantizer = self.activation(at.input, f"{at.layer}.input")
        if at.gate is not None:
            return GatedQuantOpr(op, at.row, input_quantizer, self.activation(at.gate, f"{at.layer}.gate"))
        plain = (WeightedQuantOpr if is_module else FunctionalWeightedQuantOpr) if is_weighted else QuantOpr
        kind: type[Any] = at.row.implementation or plain
        wrapped: QuantOpr = kind.new(op, at.row, input_quantizer, self._weight(op, at) if is_weighted else None)
        if is_module:
            wrapped.train(op.training)
            self.wrapped[id(op)] = (op, wrapped)  # the op is held, so that its id stays its own
        return wrapped

    def activation(self, site: str | None, name: str = "") -> Quantizer:
        """The site's quantizer; without a site in the plan, one called `name` that is off."""
        return self._build(self.plan[site], 1) if site in self.plan and site is not None else _off(name, ACTIVATION)

    def _weight(self, op: Any, at: InsideOf) -> Quantizer:
        if at.weight is None or at.weight not in self.plan:
            return _off(f"{at.layer}.weight", "weight")
        site = self.plan[at.weight]
        # `F.conv2d(x, w)`: w may be computed from anything, so its range is observed in forwards, like an activation's.
        if not isinstance(op, nn.Module):
            return self._build(site, 1, observed_as=ACTIVATION)
        with side_effect_free_reads(op):
            weight = getattr(op, at.row.weight or "weight")
        return self._build(site, num_rows(weight.shape, site.spec.granularity))

    def _build(self, site: Site, num_scales: int, observed_as: Target | None = None) -> Quantizer:
        quantizer = quantizer_of(site, self.plan.config.BACKEND, num_scales, observed_as)
        self.made[site.name] = quantizer
        return quantizer


def quantizer_of(site: Site, backend: str, num_scales: int, observed_as: Target | None = None) -> Quantizer:
    """A fresh quantizer for the site. `observed_as`: the role for its observer, if it is not the tensor's own."""
    return build_quantizer(
        site.quantizer,
        site.spec,
        "weight" if site.role == "weight" else ACTIVATION,
        name=site.name,
        backend=backend,
        num_scales=num_scales,
        observer=site.observer,
        observer_options=site.observer_options,
        options=site.quantizer_options,
        ema_ratio=site.ema_ratio,
        observed_as=observed_as,
    )


def _off(site: str, target: Target) -> Quantizer:
    quantizer = build_quantizer("uniform", TensorSpec(8, True, PerTensor()), target, name=site)
    quantizer.set_fake_fused()
    return quantizer


def _homes(*hosts: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Per module (by id), every place in the hosts where it is registered."""
    homes: dict[int, list[tuple[nn.Module, str]]] = {}
    for parent in {id(module): module for host in hosts for module in host.modules()}.values():
        for key, child in parent._modules.items():
            if child is not None:
                homes.setdefault(id(child), []).append((parent, key))
    return homes
