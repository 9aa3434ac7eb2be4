"""Makes a plan from config, graph and runtime profile: which tensors are quantized, how, and why others are not.

The result is a `Plan`, which is a value, and the `Placement` of its sites in the graphs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, TypeVar

from torch import Tensor, fx, nn

from sparsebit.config.rules import format_of
from sparsebit.config.schema import ActivationConfig, QuantConfig, TensorConfig, WeightConfig
from sparsebit.deploy.runtimes import PROFILES, RuntimeProfile
from sparsebit.errors import BackendError
from sparsebit.graph.capture import Captured
from sparsebit.graph.nodes.aliasing import overwritten
from sparsebit.graph.nodes.value_kinds import python_values, static_values, tensor_inputs
from sparsebit.graph.ops.op_rows import OpKind, OpRow
from sparsebit.graph.ops.op_table import input_argument, keeps_grid, row_of, row_of_module, tensor_arguments
from sparsebit.graph.region import Region
from sparsebit.graph.tracing.leaf_policy import LeafPolicy
from sparsebit.quantization.ops.layer_call import at_rest
from sparsebit.quantization.planning.disable_unnecessary_quant import absorbed_by, chain_end
from sparsebit.quantization.planning.divisors import NOT_ZERO, divisor_makers, reads_as_divisor
from sparsebit.quantization.planning.float_reasons import COMPLEX, HIDDEN, SWITCHED_OFF
from sparsebit.quantization.planning.group_rules import check_groups
from sparsebit.quantization.planning.grouping import Grouping, Wants, with_sites
from sparsebit.quantization.planning.masks import hidden_values
from sparsebit.quantization.planning.placement import InsideOf, Placement
from sparsebit.quantization.planning.sites import Plan, Site, layer_name, site_of
from sparsebit.quantization.planning.writes import IN_PLACE

_INTEGER_PATH = frozenset({"batch_norm", "add", "cat", "max_pool", "avg_pool", "upsample"})
# Ops that are only quantized if convolutions feed all their inputs.
_FED_BY_ALL = frozenset({"cat", "mul"})
PRODUCTS = frozenset({"matmul", "bmm", "baddbmm", "einsum"})
_ENDS_FOR_ADDS = frozenset({"add", "cat", "flatten", "permute", "reshape"})
_QUANTIZABLE = (OpKind.WEIGHTED, OpKind.UNARY, OpKind.MULTI)
C = TypeVar("C", bound=TensorConfig)


def make_plan(captured: Captured, config: QuantConfig) -> tuple[Plan, Placement]:
    """The plan of a captured model, and where in its graphs each site is.

    With `virtual` every known op quantizes its inputs; with a runtime, those in its profile do.
    """
    draft = _Draft(config, PROFILES[config.BACKEND], floats=dict(captured.untouched))
    placement = Placement()
    for path, region in captured.regions.items():
        planner = _RegionPlanner(path, region, captured, draft)
        wants, root = planner.make(), region.graph_module
        grouping = Grouping(path, root, planner.rows, wants, draft.add_site, draft.free_name, draft.wrapped)
        placement.regions[path] = grouping.place()
    for path, loose in captured.loose.items():
        planned = None if path in captured.untouched else _plan_loose(path, loose.module, draft)
        if planned is not None:
            placement.loose[path] = planned
    return draft.plan(), placement


@dataclass
class _Draft:
    """A plan that is being built; `wrapped`: the modules (by id) whose sites are in it."""

    config: QuantConfig
    profile: RuntimeProfile
    sites: dict[str, Site] = field(default_factory=dict)
    floats: dict[str, str] = field(default_factory=dict)
    layers: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    wrapped: dict[int, nn.Module] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Warn for each key that the user wrote and the profile would set otherwise (for adds: where it matters)."""
        for setting in self.profile.costs:
            key, _, value = setting.partition("=")
            if key != "A.QADD.ENABLE_QUANT" and self.config.is_set(key) and str(_value_at(self.config, key)) == value:
                self.note_cost(setting)

    def plan(self) -> Plan:
        return Plan(self.config, self.sites, self.floats, tuple(self.layers), tuple(self.warnings))

    def free_name(self, wanted: str) -> str:
        """The site's name; if the model calls a layer twice, the second one's has a number."""
        name, number = wanted, 1
        while name in self.names:
            number += 1
            name = f"{wanted}.{number}"
        self.names.add(name)
        return name

    def add_site(self, wanted: str, config: TensorConfig, channel_axis: int) -> str:
        name = self.free_name(wanted)
        self.sites[name] = site_of(name, config, channel_axis, narrow=self.profile.narrow_weights)
        return name

    def note_cost(self, setting: str) -> None:
        cost = f"{setting} is obeyed, against the {self.profile.name} profile: {self.profile.costs[setting]}"
        if cost not in self.warnings:
            self.warnings.append(cost)

    def note_float(self, name: str, row: OpRow | None, op: Any) -> None:
        if row is None:
            if isinstance(op, type) and not issubclass(op, nn.Module):
                return  # a container or an output class
            op_name = getattr(op, "__name__", op)
            self.floats[name] = f"unknown op {op_name}: passes through in float (register_qmodule teaches it)"
        elif row.kind is OpKind.FLOAT:
            self.floats[name] = row.reason

    def note_disabled(self, name: str, activation: TensorConfig | None, weight: TensorConfig | None) -> None:
        given = [config for config in (activation, weight) if config is not None]
        if given and all(config.QUANTIZER.DISABLE for config in given):
            self.floats[name] = SWITCHED_OFF[0]

    def is_skipped(self, name: str) -> bool:
        """Whether the user's config keeps this module in float; it is then recorded."""
        is_skipped = LeafPolicy(skip=self.config.SKIP_TRACE_MODULES).is_skipped(name)
        if is_skipped:
            self.floats[name] = SWITCHED_OFF[1]
        return is_skipped


def _plan_loose(path: str, module: nn.Module, draft: _Draft) -> InsideOf | None:
    """A layer that runs in a module's own code."""
    if draft.is_skipped(path):
        return None
    config, profile, row = draft.config, draft.profile, row_of_module(module)
    if row is None or row.kind not in _QUANTIZABLE:
        draft.note_float(path, row, type(module))
        return None
    draft.layers.append(path)
    if _is_complex(module):
        draft.floats[path] = COMPLEX
        return None
    if not _wants(row, profile) or row.name in profile.conv_fed:
        draft.floats[path] = f"{profile.name} runs {row.name} in float"
        return None
    if getattr(module, "inplace", False) is True:
        draft.floats[path] = IN_PLACE
        return None
    activation = config.resolve("A", path)
    weight = config.resolve("W", path) if row.kind is OpKind.WEIGHTED else None
    has_input = bool(row.inputs) and row.kind is not OpKind.MULTI
    if weight is not None:
        _check_groups(path, weight, module, row, config.BACKEND)
    draft.note_disabled(path, activation, weight)
    if id(module) in draft.wrapped:
        return InsideOf(None, row, path)
    draft.wrapped[id(module)] = module
    at = InsideOf(None, row, path)
    return with_sites(at, draft.add_site, _enabled(activation) if has_input else None, _enabled(weight))


class _RegionPlanner:
    """Walks one graph once."""

    def __init__(self, path: str, region: Region, captured: Captured, draft: _Draft) -> None:
        self.path, self.draft = path, draft
        self.config, self.profile = config, profile = draft.config, draft.profile
        self.root = region.graph_module
        self.graph = self.root.graph
        self.opaque = captured.untraced
        self.untouched = captured.untouched
        self.python = python_values(self.graph)
        self.rows = {node: row for node in self.graph.nodes if (row := self._row(node)) is not None}
        keeps_chains = config.SCHEDULE.DISABLE_UNNECESSARY_QUANT
        absorbs = None if profile.inputs is None else profile.absorbs
        chains = absorbed_by(self.graph, self.rows, absorbs) if keeps_chains else {}
        # A layer that the user's config keeps in float absorbs nothing.
        self.absorbed = {node: front for node, front in chains.items() if not self._is_off(_head(node, chains))}
        self.divisor_makers = divisor_makers(self.graph, self.rows)
        self.hidden = hidden_values(self.graph, self.rows, self.python)
        self.conv_fed: dict[tuple[fx.Node, frozenset[str]], bool] = {}
        self.out = Wants()

    def make(self) -> Wants:
        static = static_values(self.graph)  # computing a weight is not arithmetic on activations
        for node in self.graph.nodes:
            if node.op not in ("call_module", "call_function", "call_method") or node in self.python:
                continue
            row = self.rows.get(node)
            is_layer = node.op == "call_module" and row is not None and row.kind is OpKind.WEIGHTED
            if node not in static or is_layer:
                self._place(node, row, layer_name(self.path, node))
        return self.out

    def _is_off(self, node: fx.Node) -> bool:
        """Whether the config keeps all of a layer in float."""
        name = layer_name(self.path, node)
        if node.op == "call_module" and LeafPolicy(skip=self.config.SKIP_TRACE_MODULES).is_skipped(name):
            return True
        kinds: tuple[Literal["W", "A"], ...] = ("W", "A") if self.rows[node].kind is OpKind.WEIGHTED else ("A",)
        return all(self.config.resolve(kind, name).QUANTIZER.DISABLE for kind in kinds)

    def _place(self, node: fx.Node, row: OpRow | None, name: str) -> None:
        if node.op == "call_module" and (name in self.untouched or self.draft.is_skipped(name)):
            return
        if row is None or row.kind not in _QUANTIZABLE:
            if name not in self.opaque:
                op = type(self.root.get_submodule(str(node.target))) if node.op == "call_module" else node.target
                self.draft.note_float(name, row, op)
            return
        self.draft.layers.append(name)
        activation = self.config.resolve("A", name)
        reason = self._why_float(node, row, activation)
        if reason:
            self.draft.floats[name] = reason
            return
        weight = self.config.resolve("W", name) if row.kind is OpKind.WEIGHTED else None
        self.draft.note_disabled(name, activation, weight)
        if _enabled(activation) is not None:
            written = overwritten(node, self.root)
            hidden = [source for source in self._sources(node, row) if source in self.hidden]
            sources = [s for s in self._sources(node, row) if s is not written and s not in self.hidden]
            if sources:
                self.out.inputs[node] = dict.fromkeys(sources, activation)
            elif written is not None:
                self.draft.floats[name] = IN_PLACE
            elif hidden:
                self.draft.floats[name] = HIDDEN
            elif reads_as_divisor(node):
                self.draft.floats[name] = "a number divided by a tensor: the divisor stays in float"
            for divisor in reads_as_divisor(node) if sources else ():
                self.draft.floats[f"{name}: divisor {layer_name(self.path, divisor)}"] = (
                    "rounded to zero it would give infinity"
                )
            if row.name in self.profile.gates and written is None:
                self.out.gates[node] = activation
            if row.name in self.profile.outputs:
                self.out.outputs[chain_end(node, self.absorbed)] = activation
        if weight is not None and _enabled(weight) is not None:
            self._check_apart(node, row, weight)
            if node.op == "call_module":
                module = self.root.get_submodule(str(node.target))
                _check_groups(name, weight, module, row, self.config.BACKEND)
            self.out.weights[node] = weight

    def _check_apart(self, node: fx.Node, row: OpRow, weight: WeightConfig) -> None:
        """Raise for a weight whose format the runtime does not support after a quantized output."""
        if format_of(weight) not in self.profile.apart:
            return
        for source in self._sources(node, row):
            while source not in self.out.outputs and self._tensors(source):
                if source not in self.rows or not keeps_grid(self.rows[source], source, self.root):
                    break
                source = self._tensors(source)[0]
            if source in self.out.outputs:
                layer = layer_name(self.path, _head(source, self.absorbed))
                raise BackendError(
                    f"W.QUANTIZER.TYPE={weight.QUANTIZER.TYPE} at {layer_name(self.path, node)}: its input is the "
                    f"quantized output of {layer}, and {self.profile.name} fuses the layer into an integer kernel, "
                    f"which takes no {weight.QUANTIZER.TYPE} weight; set "
                    f"A.QUANTIZER.DISABLE: true at {layer} too, another W.QUANTIZER.TYPE here, or BACKEND: virtual"
                )

    def _why_float(self, node: fx.Node, row: OpRow, activation: ActivationConfig) -> str:
        """Why this op gets no quantizer; empty if it gets one."""
        if node.op == "call_module" and _is_complex(self.root.get_submodule(str(node.target))):
            return COMPLEX
        if node in self.absorbed:
            return f"absorbed by {layer_name(self.path, self.absorbed[node])}"
        if not _wants(row, self.profile):
            return f"{self.profile.name} runs {row.name} in float"
        if node in self.divisor_makers:
            return NOT_ZERO
        if row.name == "add" and (self.profile.inputs is None or activation.is_set("QADD.ENABLE_QUANT")):
            wanted = activation.QADD.ENABLE_QUANT
            if self.profile.inputs is not None and wanted != self._is_conv_fed(node):
                self.draft.note_cost(f"A.QADD.ENABLE_QUANT={wanted}")
            return "" if wanted else "A.QADD.ENABLE_QUANT is off"
        if row.name in self.profile.conv_fed and not self._is_conv_fed(node):
            return f"no convolution feeds it: {self.profile.name} is faster with this {row.name} in float"
        return ""

    def _is_conv_fed(self, node: fx.Node) -> bool:
        """Whether a convolution feeds the op through ops that keep integers: activations, norms, moves, pools.

        A concat requires that of all its inputs: otherwise coordinates computed in float would share the grid of
        scores. So does a product (the gate of squeeze and excitation), and it must have two tensors: factors that are
        numbers or parameters scale boxes, or belong to a norm. One of the two must already be on a grid: after an
        activation that runs in float (mish), a product in integers adds a conversion. An add looks no further than the
        next add or concat, and not through moves that turn an image into tokens: the stem's convolution does not make a
        transformer's residual stream a CNN's.
        """
        row = self.rows[node]
        stops = _ENDS_FOR_ADDS if row.name == "add" else frozenset()
        return self._is_fed(node, row, stops)

    def _is_fed(self, node: fx.Node, row: OpRow, stops: frozenset[str]) -> bool:
        sources = self._tensors(node)
        if row.name == "mul" and (len(sources) < 2 or not any(self._is_on_grid(source) for source in sources)):
            return False
        among = all if row.name in _FED_BY_ALL else any
        return among(self._comes_from_conv(source, stops) for source in sources)

    def _comes_from_conv(self, node: fx.Node, stops: frozenset[str]) -> bool:
        row = self.rows.get(node)
        if row is None or row.name == "conv":
            return row is not None
        is_product = row.name == "mul" and chain_end(node, self.absorbed) in self.out.outputs  # it runs in integers
        keeps = row.kind is OpKind.TRANSPARENT or row.is_activation or row.name in _INTEGER_PATH or is_product
        if row.name in stops or not keeps:
            return False
        if (node, stops) not in self.conv_fed:
            self.conv_fed[node, stops] = self._is_fed(node, row, stops)
        return self.conv_fed[node, stops]

    def _is_on_grid(self, node: fx.Node) -> bool:
        """Whether the value is a quantized output, possibly moved since."""
        while node not in self.out.outputs:
            row, sources = self.rows.get(node), self._tensors(node)
            if row is None or not sources or not keeps_grid(row, node, self.root):
                return False
            node = sources[0]
        return True

    def _tensors(self, node: fx.Node) -> list[fx.Node]:
        return [source for source in node.all_input_nodes if source not in self.python]

    def _sources(self, node: fx.Node, row: OpRow) -> list[fx.Node]:
        values: list[Any]
        if row.kind is OpKind.MULTI:
            values = list(tensor_arguments(row, node.args, node.kwargs).values())
            if row.name in PRODUCTS:
                values = [value for value in values if not self._is_stack(value)]
        else:
            place = input_argument(row, node.args, node.kwargs, is_module=node.op == "call_module")
            values = [node.kwargs[place] if isinstance(place, str) else node.args[place]] if place is not None else []
        return list(dict.fromkeys(source for value in values for source in tensor_inputs(value, self.python)))

    def _is_stack(self, value: Any) -> bool:
        """Whether an operand is a parameter of stacked matrices: a weight, with its own quantizer."""
        while isinstance(value, fx.Node) and value.op != "get_attr":
            row = self.rows.get(value)
            if row is None or row.kind is not OpKind.TRANSPARENT or not value.all_input_nodes:
                return False
            value = value.all_input_nodes[0]
        found = attrgetter(str(value.target))(self.root) if isinstance(value, fx.Node) else None
        return isinstance(found, nn.Parameter) and sum(size > 1 for size in found.shape) > 2

    def _row(self, node: fx.Node) -> OpRow | None:
        return None if node in self.python or self._is_entered(node) else row_of(node, self.root)

    def _is_entered(self, node: fx.Node) -> bool:
        """Whether the node is an untraced module whose layers are planned one by one."""
        if node.op != "call_module" or layer_name(self.path, node) not in self.opaque:
            return False
        return any(True for _ in self.root.get_submodule(str(node.target)).children())


def _check_groups(name: str, config: WeightConfig, module: nn.Module, row: OpRow, backend: str) -> None:
    """Check groups before calibration. The export checks weights that the model computes in its forward."""
    with at_rest(module):
        weight = getattr(module, row.weight or "weight", None)
    if isinstance(weight, Tensor):
        check_groups(name, config, weight.shape, row.channel_axis, backend)


def _head(node: fx.Node, chains: dict[fx.Node, fx.Node]) -> fx.Node:
    while node in chains:
        node = chains[node]
    return node


def _is_complex(module: nn.Module) -> bool:
    """Whether the layer computes with complex numbers."""
    return any(parameter.is_complex() for parameter in module.parameters(recurse=False))


def _wants(row: OpRow, profile: RuntimeProfile) -> bool:
    return profile.inputs is None or row.name in profile.inputs or row.implementation is not None


def _enabled(config: C | None) -> C | None:
    return None if config is None or config.QUANTIZER.DISABLE else config


def _value_at(config: QuantConfig, key: str) -> object:
    value: object = config
    for name in key.split("."):
        value = getattr(value, name)
    return value
