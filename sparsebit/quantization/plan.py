"""Config + graph + runtime profile -> which tensors are quantized, how, and why the others are not. Nothing is written back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from sparsebit.config.schema import ActivationConfig, QuantConfig, TensorConfig, WeightConfig
from sparsebit.deploy.runtimes import PROFILES, RuntimeProfile
from sparsebit.graph.capture import Captured, Region
from sparsebit.graph.values import python_values, static_values, tensor_inputs
from sparsebit.numerics.spec import Granularity, PerChannel, PerGroup, PerTensor, TensorSpec
from sparsebit.quantization.ops.table import OpKind, OpRow, row_of, row_of_module, tensor_arguments
from sparsebit.quantization.passes.disable_unnecessary_quant import absorbed_by, chain_end

_INTEGER_PATH = frozenset({"batch_norm", "add", "cat", "max_pool", "avg_pool", "upsample"})
_QUANTIZABLE = (OpKind.WEIGHTED, OpKind.UNARY, OpKind.MULTI)


@dataclass
class RegionPlan:
    """`inputs[consumer][source]`: how the consumer wants that input; `outputs[node]`; `weights[node]`."""

    inputs: dict[fx.Node, dict[fx.Node, ActivationConfig]] = field(default_factory=dict)
    outputs: dict[fx.Node, ActivationConfig] = field(default_factory=dict)
    weights: dict[fx.Node, WeightConfig] = field(default_factory=dict)


@dataclass
class LoosePlan:
    """A layer inside an untraced module."""

    row: OpRow
    input: ActivationConfig | None
    weight: WeightConfig | None


@dataclass
class Plan:
    """The whole model's placement: per region, per loose layer; `floats`: layers without a quantizer and the reason;
    `warnings`: what the user's own keys cost against the runtime's profile."""

    regions: dict[str, RegionPlan] = field(default_factory=dict)
    loose: dict[str, LoosePlan] = field(default_factory=dict)
    floats: dict[str, str] = field(default_factory=dict)
    layers: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def make_plan(captured: Captured, config: QuantConfig) -> Plan:
    """Place quantizers. `virtual`: every known op quantizes its inputs. A runtime: what its profile lists."""
    profile = PROFILES[config.BACKEND]
    plan = Plan(warnings=_costs(config, profile))
    for path, region in captured.regions.items():
        plan.regions[path] = _RegionPlanner(path, region, captured, config, profile, plan).make()
    for path, loose in captured.loose.items():
        row = row_of_module(loose.module)
        if row is None or row.kind not in _QUANTIZABLE:
            _note_float(plan, path, row, type(loose.module))
            continue
        plan.layers.append(path)
        wants = _wants_inputs(row, profile) and row.name not in profile.conv_fed and bool(row.inputs) and row.kind is not OpKind.MULTI
        weight = config.resolve("W", path) if row.kind is OpKind.WEIGHTED and _wants_inputs(row, profile) else None
        input_config = config.resolve("A", path) if wants else None
        if wants or weight is not None:
            plan.loose[path] = LoosePlan(row, _enabled(input_config), _enabled(weight))
            _note_disabled(plan, path, input_config, weight)
        else:
            plan.floats[path] = f"{profile.name} runs {row.name} in float"
    return plan


def layer_name(region_path: str, node: fx.Node) -> str:
    """A node's name for configs and reports: its module's path, or the name the graph gave it."""
    local = str(node.target) if node.op == "call_module" else node.name
    return f"{region_path}.{local}" if region_path else local


def spec_of(config: TensorConfig, channel_axis: int) -> TensorSpec:
    """The number format that one tensor's config asks for; `channel_axis` is the tensor's own."""
    granularity: Granularity = PerTensor()
    if config.granularity == "channel":
        granularity = PerChannel(channel_axis)
    elif config.granularity == "group":
        assert isinstance(config, WeightConfig)
        granularity = PerGroup(1 - channel_axis, config.QUANTIZER.GROUP_SIZE)
    return TensorSpec(config.QUANTIZER.BIT, config.symmetric, granularity)


def feature_axis(config: ActivationConfig) -> int:
    return 1 if config.OBSERVER.LAYOUT == "NCHW" else -1


class _RegionPlanner:
    """Walks one graph once."""

    def __init__(self, path: str, region: Region, captured: Captured, config: QuantConfig, profile: RuntimeProfile, plan: Plan) -> None:
        self.path, self.config, self.profile, self.plan = path, config, profile, plan
        self.root = region.graph_module
        self.graph = self.root.graph
        self.opaque = captured.untraced
        self.python = python_values(self.graph)
        self.rows = {node: row for node in self.graph.nodes if (row := self._row(node)) is not None}
        keeps_chains = config.SCHEDULE.DISABLE_UNNECESSARY_QUANT
        absorbs = None if profile.inputs is None else profile.absorbs
        self.absorbed = absorbed_by(self.graph, self.rows, absorbs) if keeps_chains else {}
        self.out = RegionPlan()

    def make(self) -> RegionPlan:
        static = static_values(self.graph)  # how a weight is made is no arithmetic on activations
        for node in self.graph.nodes:
            if node.op not in ("call_module", "call_function", "call_method") or node in self.python or node in static:
                continue
            self._place(node, self.rows.get(node), layer_name(self.path, node))
        return self.out

    def _place(self, node: fx.Node, row: OpRow | None, name: str) -> None:
        if row is None or row.kind not in _QUANTIZABLE:
            if name not in self.opaque:
                op = type(self.root.get_submodule(str(node.target))) if node.op == "call_module" else node.target
                _note_float(self.plan, name, row, op)
            return
        self.plan.layers.append(name)
        reason = self._why_float(node, row)
        if reason:
            self.plan.floats[name] = reason
            return
        activation = self.config.resolve("A", name)
        weight = self.config.resolve("W", name) if row.kind is OpKind.WEIGHTED else None
        _note_disabled(self.plan, name, activation, weight)
        if _enabled(activation) is not None:
            sources = self._sources(node, row)
            if sources:
                self.out.inputs[node] = dict.fromkeys(sources, activation)
            if row.name in self.profile.outputs:
                self.out.outputs[chain_end(node, self.absorbed)] = activation
        if weight is not None and _enabled(weight) is not None:
            self.out.weights[node] = weight

    def _why_float(self, node: fx.Node, row: OpRow) -> str:
        """Why this op gets no quantizer; empty where it gets one."""
        if node in self.absorbed:
            return f"absorbed by {layer_name(self.path, self.absorbed[node])}"
        if not _wants_inputs(row, self.profile):
            return f"{self.profile.name} runs {row.name} in float"
        if row.name == "add" and not self._adds_enabled(node):
            return "A.QADD.ENABLE_QUANT is off" if self.profile.inputs is None or self.config.is_set("A.QADD.ENABLE_QUANT") else (
                f"no convolution feeds it: {self.profile.name} is faster with this add in float"
            )
        if row.name in self.profile.conv_fed and row.name != "add" and not self._is_conv_fed(node):
            return f"no convolution feeds it: {self.profile.name} is faster with this {row.name} in float"
        return ""

    def _adds_enabled(self, node: fx.Node) -> bool:
        name = layer_name(self.path, node)
        if self.profile.inputs is None or self.config.is_set("A.QADD.ENABLE_QUANT"):
            return self.config.resolve("A", name).QADD.ENABLE_QUANT
        return self._is_conv_fed(node)

    def _is_conv_fed(self, node: fx.Node) -> bool:
        """Whether some input comes from a convolution through ops that keep integers (activations, norms, moves, pools).

        An add looks no further than the next add or concat: the stem's convolution does not make a transformer's residual
        stream a CNN's.
        """
        passes = _INTEGER_PATH - {"add", "cat"} if self.rows[node].name == "add" else _INTEGER_PATH
        pending, seen = list(node.all_input_nodes), set()
        while pending:
            source = pending.pop()
            row = self.rows.get(source)
            if source in seen or row is None:
                continue
            seen.add(source)
            if row.name == "conv":
                return True
            if row.kind is OpKind.TRANSPARENT or row.is_activation or row.name in passes:
                pending.extend(source.all_input_nodes)
        return False

    def _sources(self, node: fx.Node, row: OpRow) -> list[fx.Node]:
        if row.kind is OpKind.MULTI:
            arguments = tensor_arguments(row, node.args, node.kwargs)
        elif not row.inputs:
            arguments = []
        elif node.op == "call_module":
            arguments = [(0, node.args[0])] if node.args else list(node.kwargs.items())[:1]
        else:
            arguments = tensor_arguments(row, node.args, node.kwargs)[:1]
        return list(dict.fromkeys(source for _, value in arguments for source in tensor_inputs(value, self.python)))

    def _row(self, node: fx.Node) -> OpRow | None:
        if node in self.python or (node.op == "call_module" and layer_name(self.path, node) in self.opaque and any(self.root.get_submodule(str(node.target)).children())):
            return None
        return row_of(node, self.root)


def _wants_inputs(row: OpRow, profile: RuntimeProfile) -> bool:
    return profile.inputs is None or row.name in profile.inputs or row.implementation is not None


def _enabled(config: TensorConfig | None) -> TensorConfig | None:
    return None if config is None or config.QUANTIZER.DISABLE else config


def _note_float(plan: Plan, name: str, row: OpRow | None, op: Any) -> None:
    if row is None:
        if isinstance(op, type) and not issubclass(op, nn.Module):
            return  # a container or an output class
        plan.floats[name] = f"unknown op {getattr(op, '__name__', op)}: passes through in float (register_qmodule teaches it)"
    elif row.kind is OpKind.FLOAT:
        plan.floats[name] = row.reason


def _note_disabled(plan: Plan, name: str, activation: TensorConfig | None, weight: TensorConfig | None) -> None:
    given = [config for config in (activation, weight) if config is not None]
    if given and all(config.QUANTIZER.DISABLE for config in given):
        plan.floats[name] = "QUANTIZER.DISABLE is true in the config"


def _costs(config: QuantConfig, profile: RuntimeProfile) -> list[str]:
    """One line per key that the user wrote and that the runtime's profile would set otherwise."""
    found = []
    for setting, cost in profile.costs.items():
        key, _, value = setting.partition("=")
        current: object = config
        for part in key.split("."):
            current = getattr(current, part)
        if config.is_set(key) and str(current) == value:
            found.append(f"{key}={value} is obeyed, against the {profile.name} profile: {cost}")
    return found
