"""Makes a plan from config, graph and runtime profile: which tensors are quantized, how, and why others are not.

`make_plan` first notes what is known about the nodes of a captured graph (`graph_facts.py`). Then it visits every node
once, in order, and decides: no quantizer (with a reason in `floats`), or requests for quantized inputs, outputs and
weights. `Grouping` then turns a graph's requests into sites. Layers outside of graphs are planned one by one
(`_plan_loose`).

The order of visits matters: whether an op's input is on a grid already is looked up in the requests of earlier nodes.
Nothing is built here, and neither the graph nor the config changes: the results are values.
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor, fx, nn

from sparsebit.config.rules import format_of
from sparsebit.config.schema import ActivationConfig, QuantConfig, TensorConfig, WeightConfig
from sparsebit.deploy.runtimes import PROFILES, RuntimeProfile
from sparsebit.errors import BackendError
from sparsebit.graph.capture import Captured
from sparsebit.graph.nodes.aliasing import overwritten
from sparsebit.graph.nodes.graph_module import module_of
from sparsebit.graph.ops.op_rows import OpKind, OpRow
from sparsebit.graph.ops.op_table import keeps_grid, row_of_module
from sparsebit.quantization.ops.layer_call import side_effect_free_reads
from sparsebit.quantization.planning.disable_unnecessary_quant import absorbed_by, chain_end
from sparsebit.quantization.planning.divisors import NOT_ZERO, reads_as_divisor
from sparsebit.quantization.planning.draft import Draft
from sparsebit.quantization.planning.float_reasons import COMPLEX, HIDDEN
from sparsebit.quantization.planning.graph_facts import GraphFacts, graph_facts
from sparsebit.quantization.planning.group_rules import check_groups
from sparsebit.quantization.planning.grouping import Grouping, Requests, with_sites
from sparsebit.quantization.planning.placement import InsideOf, Placement
from sparsebit.quantization.planning.sites import Plan
from sparsebit.quantization.planning.writes import IN_PLACE

# Ops through which a runtime keeps integers, besides activation functions and ops that only move values.
_INTEGER_PATH = frozenset({"batch_norm", "add", "cat", "max_pool", "avg_pool", "upsample"})
# Ops that are only quantized if convolutions feed all their inputs.
_FED_BY_ALL = frozenset({"cat", "mul"})
# For an add, the search for a convolution ends at these; `_is_conv_fed` says why.
_ENDS_FOR_ADDS = frozenset({"add", "cat", "flatten", "permute", "reshape"})
_QUANTIZABLE = (OpKind.WEIGHTED, OpKind.UNARY, OpKind.MULTI)
C = TypeVar("C", bound=TensorConfig)


def make_plan(captured: Captured, config: QuantConfig) -> tuple[Plan, Placement]:
    """The plan of a captured model, and where in its graphs each site is.

    With `virtual` every known op quantizes its inputs; with a runtime, those in its profile do.
    """
    draft = Draft(config, PROFILES[config.BACKEND], floats=dict(captured.untouched))
    placement = Placement()
    for path, region in captured.regions.items():
        facts = graph_facts(path, region.graph_module, captured.untraced)
        requests = _RegionPlanner(facts, captured, draft).make()
        sites = draft.add_site, draft.free_name, draft.wrapped
        grouping = Grouping(path, region.graph_module, facts.rows, requests, *sites)
        placement.regions[path] = grouping.place()
    for path, loose in captured.loose.items():
        planned = None if path in captured.untouched else _plan_loose(path, loose.module, draft)
        if planned is not None:
            placement.loose[path] = planned
    return draft.plan(), placement


def _plan_loose(path: str, module: nn.Module, draft: Draft) -> InsideOf | None:
    """The sites of a layer that a module's own code calls; None if it stays float.

    No graph shows what feeds it or reads its output, so a profile's rules about neighbours are decided as "no".
    """
    if draft.notes_skip(path):
        return None
    config, profile, row = draft.config, draft.profile, row_of_module(module)
    if row is None or row.kind not in _QUANTIZABLE:
        draft.note_float(path, row, type(module))
        return None
    draft.layers.append(path)
    reason = COMPLEX if _is_complex(module) else ""
    if not _can_quantize(row, profile) or row.name in profile.conv_fed:
        reason = reason or f"{profile.name} runs {row.name} in float"
    if reason or getattr(module, "inplace", False) is True:
        draft.floats[path] = reason or IN_PLACE
        return None
    activation, at = config.resolve("A", path), InsideOf(None, row, path)
    weight = config.resolve("W", path) if row.kind is OpKind.WEIGHTED else None
    has_input = bool(row.inputs) and row.kind is not OpKind.MULTI
    if weight is not None:
        _check_groups(path, weight, module, row, config.BACKEND)
    draft.note_disabled(path, activation, weight)
    if id(module) in draft.wrapped:  # also registered elsewhere, where its sites were created
        return at
    draft.wrapped[id(module)] = module
    return with_sites(at, draft.add_site, _enabled(activation) if has_input else None, _enabled(weight))


class _RegionPlanner:
    """Visits the nodes of one graph, and collects the requests for quantizers."""

    def __init__(self, facts: GraphFacts, captured: Captured, draft: Draft) -> None:
        self.facts, self.rows, self.root, self.draft = facts, facts.rows, facts.root, draft
        self.config, self.profile = draft.config, draft.profile
        self.opaque, self.untouched = captured.untraced, captured.untouched
        keeps_chains = self.config.SCHEDULE.DISABLE_UNNECESSARY_QUANT
        absorbs = None if self.profile.inputs is None else self.profile.absorbs
        chains = absorbed_by(self.root.graph, self.rows, absorbs) if keeps_chains else {}
        # A layer that the user's config keeps in float absorbs nothing.
        self.absorbed = {node: front for node, front in chains.items() if not self._is_off(_head(node, chains))}
        self.conv_fed: dict[tuple[fx.Node, frozenset[str]], bool] = {}
        self.requests = Requests()

    def make(self) -> Requests:
        for node in self.facts.planned():
            self._plan_node(node, self.rows.get(node), self.facts.name_of(node))
        return self.requests

    def _is_off(self, node: fx.Node) -> bool:
        """Whether the config keeps all of a layer in float."""
        name = self.facts.name_of(node)
        if node.op == "call_module" and self.draft.skips(name):
            return True
        is_weight_off = self.rows[node].kind is not OpKind.WEIGHTED or self.config.resolve("W", name).QUANTIZER.DISABLE
        return is_weight_off and self.config.resolve("A", name).QUANTIZER.DISABLE

    def _plan_node(self, node: fx.Node, row: OpRow | None, name: str) -> None:
        if node.op == "call_module" and (name in self.untouched or self.draft.notes_skip(name)):
            return
        if row is None or row.kind not in _QUANTIZABLE:
            if name not in self.opaque:
                module = module_of(node, self.root)
                self.draft.note_float(name, row, node.target if module is None else type(module))
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
            self._request_activations(node, row, name, activation)
        if weight is not None and _enabled(weight) is not None:
            self._check_apart(node, row, weight)
            if (module := module_of(node, self.root)) is not None:
                _check_groups(name, weight, module, row, self.config.BACKEND)
            self.requests.weights[node] = weight

    def _request_activations(self, node: fx.Node, row: OpRow, name: str, activation: ActivationConfig) -> None:
        written, divisors, floats = overwritten(node, self.root), reads_as_divisor(node), self.draft.floats
        every = self.facts.sources(node)
        if sources := [s for s in every if s is not written and s not in self.facts.hidden]:
            self.requests.inputs[node] = dict.fromkeys(sources, activation)
            for divisor in divisors:
                shown = self.facts.name_of(divisor)
                floats[f"{name}: divisor {shown}"] = "rounded to zero it would give infinity"
        elif written is not None:
            floats[name] = IN_PLACE
        elif not self.facts.hidden.isdisjoint(every):
            floats[name] = HIDDEN
        elif divisors:
            floats[name] = "a number divided by a tensor: the divisor stays in float"
        if row.name in self.profile.gates and written is None:
            self.requests.gates[node] = activation
        if row.name in self.profile.outputs:
            self.requests.outputs[chain_end(node, self.absorbed)] = activation

    def _check_apart(self, node: fx.Node, row: OpRow, weight: WeightConfig) -> None:
        """Raise for a weight format (`profile.apart`) that the runtime does not support after a quantized output."""
        if format_of(weight) not in self.profile.apart:
            return
        for output in filter(None, map(self._output_of, self.facts.sources(node))):
            name, layer = self.facts.name_of(node), self.facts.name_of(_head(output, self.absorbed))
            kind = weight.QUANTIZER.TYPE
            raise BackendError(
                f"W.QUANTIZER.TYPE={kind} at {name}: its input is the quantized output of {layer}, and "
                f"{self.profile.name} fuses the layer into an integer kernel, which takes no {kind} weight; set "
                f"A.QUANTIZER.DISABLE: true at {layer} too, another W.QUANTIZER.TYPE here, or BACKEND: virtual"
            )

    def _why_float(self, node: fx.Node, row: OpRow, activation: ActivationConfig) -> str:
        """Why this op gets no quantizer; empty if it gets one."""
        module = module_of(node, self.root)
        if module is not None and _is_complex(module):
            return COMPLEX
        if node in self.absorbed:
            return f"absorbed by {self.facts.name_of(self.absorbed[node])}"
        if not _can_quantize(row, self.profile):
            return f"{self.profile.name} runs {row.name} in float"
        if node in self.facts.divisor_only:
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

        Concat: all inputs must be fed by convolutions. Otherwise coordinates computed in float would share the grid of
        scores.
        Product (the gate of squeeze and excitation): both factors must be tensors that convolutions feed, because a
        number or a parameter scales boxes or belongs to a norm; and one of the two must already be on a grid, because
        after an activation that runs in float (mish) an integer product only adds a conversion.
        Add: the search ends at the next add or concat, and at moves that turn an image into tokens. Otherwise the
        convolution in a transformer's stem would count for all of its residual stream.
        """
        return self._is_fed(node, self.rows[node], _ENDS_FOR_ADDS if self.rows[node].name == "add" else frozenset())

    def _is_fed(self, node: fx.Node, row: OpRow, stops: frozenset[str]) -> bool:
        sources = self.facts.tensors(node)
        if row.name == "mul" and (len(sources) < 2 or not any(map(self._output_of, sources))):
            return False
        among = all if row.name in _FED_BY_ALL else any
        return among(self._comes_from_conv(source, stops) for source in sources)

    def _comes_from_conv(self, node: fx.Node, stops: frozenset[str]) -> bool:
        row = self.rows.get(node)
        if row is None or row.name == "conv":
            return row is not None
        is_product = (
            row.name == "mul" and chain_end(node, self.absorbed) in self.requests.outputs
        )  # it runs in integers
        keeps = row.kind is OpKind.TRANSPARENT or row.is_activation or row.name in _INTEGER_PATH or is_product
        if row.name in stops or not keeps:
            return False
        if (node, stops) not in self.conv_fed:
            self.conv_fed[node, stops] = self._is_fed(node, row, stops)
        return self.conv_fed[node, stops]

    def _output_of(self, node: fx.Node) -> fx.Node | None:
        """The op whose quantized output this value is, perhaps after ops that only move values; None without one."""
        while node not in self.requests.outputs:
            row, sources = self.rows.get(node), self.facts.tensors(node)
            if row is None or not sources or not keeps_grid(row, node, self.root):
                return None
            node = sources[0]
        return node


def _check_groups(name: str, config: WeightConfig, module: nn.Module, row: OpRow, backend: str) -> None:
    """Raise for weight groups that the backend cannot run, before any calibration is spent on them.

    A weight that the model computes in its forward has no shape yet: the export checks it.
    """
    with side_effect_free_reads(module):
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


def _can_quantize(row: OpRow, profile: RuntimeProfile) -> bool:
    """Whether the runtime quantizes this op (`inputs` is None: all), or the user registered a class for it."""
    return profile.inputs is None or row.name in profile.inputs or row.implementation is not None


def _enabled(config: C | None) -> C | None:
    return None if config is None or config.QUANTIZER.DISABLE else config
