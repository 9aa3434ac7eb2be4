"""Quantizers for weights that no op of the graph owns: stacked experts, gates of recurrent layers, weights in own code.

A parameter is a weight if a matrix product reads it. In a graph the nodes show that; for a module's own code
(and for ops that are not registered) one forward on the example inputs is observed. Without an example, a sizeable
stack of matrices is assumed to be weights. Scales are per output channel, separate for each matrix of a stack.

Called by `stages.attach`, after the layers of the graph have their quantizers: what those own is not a candidate here.
The result is a plan with further sites, and for every other matrix the reason why it stays float.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from sparsebit.config.schema import QuantConfig, WeightConfig
from sparsebit.errors import SpecError
from sparsebit.graph.capture import Captured
from sparsebit.graph.nodes.captured_block import CapturedBlock
from sparsebit.graph.nodes.graph_module import source_path
from sparsebit.graph.ops.op_rows import OpKind
from sparsebit.graph.ops.op_table import row_of, row_of_module
from sparsebit.graph.rewriting.rewrite import insert_module_after
from sparsebit.graph.tracing.leaf_policy import LeafPolicy
from sparsebit.numerics.spec import PerChannel, PerGroup, PerTensor, TensorSpec, num_rows
from sparsebit.quantization.building.attach_quantizers import quantizer_of
from sparsebit.quantization.building.parameter_sites import owned_parameters, quantizers_of_parameters
from sparsebit.quantization.ops.parameter_reads import QuantizedParameter, read_quantized
from sparsebit.quantization.ops.parameter_use import axis_of, observe_use
from sparsebit.quantization.planning.float_reasons import SWITCHED_OFF, TABLE, UNCALLED, UNEXPLAINED
from sparsebit.quantization.planning.sites import LEFT_OUT, Plan, Site, site_of, spec_of

# Without an example, a stack is only assumed to be weights if it has at least this share of all parameters.
SIZEABLE = 0.01
# For each operand of a product, the axis that the product sums over; None for one that is only added.
PRODUCTS: dict[str, tuple[int | None, ...]] = {"matmul": (-1, -2), "bmm": (-1, -2), "baddbmm": (None, -1, -2)}
# Backends that cannot read an integer weight before a float op.
_INTEGER_LAYERS_ONLY = frozenset({"tensorrt"})


@dataclass
class _Candidate:
    """A parameter without a quantizer."""

    path: str
    name: str
    owner: nn.Module
    parameter: Tensor
    axis: int | None = None  # the axis that products sum over; None until a product is found
    channel_axis: int | None = None  # the axis of the output channels, if it is a convolution's kernel
    is_watched: bool = False  # whether some reader's use of it is only visible in a forward on the example
    reads: list[tuple[fx.GraphModule, fx.Node]] = field(default_factory=list)  # where graphs read it

    @property
    def site(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name

    @property
    def is_weight(self) -> bool:
        return self.axis is not None or self.channel_axis is not None


@dataclass
class _PlanAdditions:
    """The additions to the plan."""

    floats: dict[str, str]
    given: Plan | None
    sites: dict[str, Site] = field(default_factory=dict)
    layers: list[str] = field(default_factory=list)

    def note(self, candidate: _Candidate, reason: str) -> None:
        if candidate.path not in self.floats:  # the reason of the whole layer is more informative
            self.floats[candidate.site] = reason


def attach_parameter_quantizers(captured: Captured, plan: Plan, example: Any = None, given: Plan | None = None) -> Plan:
    """Attach these quantizers, in place; returns the plan with their sites.

    `example`: the call to observe. `given`: a plan of the user, whose sites are used instead of the config's.
    """
    config, additions = plan.config, _PlanAdditions(dict(plan.floats), given)
    candidates = _candidates(captured, additions, config)
    watched = {c.site: c.parameter for c in candidates if c.is_watched and c.axis is None}
    if watched and example is not None:
        use = observe_use(watched, captured.model, *example)
        for candidate in candidates:
            candidate.axis = use.summed.get(candidate.site, candidate.axis)
            candidate.channel_axis = use.channels.get(candidate.site)
            if not candidate.is_weight and candidate.is_watched:
                additions.note(candidate, TABLE)
    elif watched:
        _guess_stacks(candidates, captured, additions)
    # A read in a graph gets a node with the quantizer; own code reads the attribute through the owner's new class. Both
    # always, because a graph's module may also run its own code.
    chosen: dict[nn.Module, dict[str, QuantizedParameter]] = {}
    for candidate in (candidate for candidate in candidates if candidate.is_weight):
        if (quantized := _quantized(candidate, additions, config)) is not None:
            chosen.setdefault(candidate.owner, {})[candidate.name] = quantized
            for root, node in candidate.reads:
                _insert(root, node, quantized)
    for owner, parameters in chosen.items():
        read_quantized(owner, parameters)
    for region in captured.regions.values():
        region.graph_module.recompile()
    sites, layers = {**plan.sites, **additions.sites}, (*plan.layers, *additions.layers)
    return dataclasses.replace(plan, sites=sites, floats=additions.floats, layers=layers)


def _candidates(captured: Captured, additions: _PlanAdditions, config: QuantConfig) -> list[_Candidate]:
    """Matrices without a quantizer: first those that graphs read, then those that modules' own code reads."""
    known = quantizers_of_parameters(captured.model)
    policy = LeafPolicy(skip=config.SKIP_TRACE_MODULES, untouched=captured.untouched)
    found: dict[int, _Candidate] = {}
    for path, region in captured.regions.items():
        root = region.graph_module
        for node in root.graph.nodes:
            parameter = attrgetter(str(node.target))(root) if node.op == "get_attr" else None
            if isinstance(parameter, nn.Parameter) and id(parameter) not in known and is_matrix(parameter):
                inner, _, name = source_path(str(node.target)).rpartition(".")
                owner = region.source.get_submodule(inner)
                full = ".".join(part for part in (path, inner) if part)
                candidate = found.setdefault(id(parameter), _Candidate(full, name, owner, parameter))
                candidate.reads.append((root, node))
                _follow_to_products(candidate, node, root)
    for owned in owned_parameters(captured.model):
        if id(owned.parameter) in known or id(owned.parameter) in found or not is_matrix(owned.parameter):
            continue
        is_fixed = isinstance(owned.owner, (fx.GraphModule, torch.jit.ScriptModule))  # these cannot get a quantizer
        if owned.layer is not None or is_fixed or type(owned.owner) in (nn.Module, CapturedBlock):
            if owned.layer is None:
                additions.floats.setdefault(owned.full_name, UNCALLED)
            continue
        candidate = _Candidate(owned.path, owned.name, owned.owner, owned.parameter)
        row = row_of_module(owned.owner)
        if row is not None and row.name == "recurrent":
            candidate.axis = 1 if owned.name.startswith("weight") else None
        else:
            candidate.is_watched = row is None or row.kind is OpKind.FLOAT
        found[id(owned.parameter)] = candidate
    # The user's config may keep its module, or one around it, in float.
    return [c for c in found.values() if not any(map(policy.is_skipped, accumulate(c.path.split("."), "{}.{}".format)))]


def is_matrix(parameter: Tensor) -> bool:
    """Whether it may be a weight: at least two axes are longer than 1."""
    return parameter.is_floating_point() and sum(size > 1 for size in parameter.shape) >= 2


def _follow_to_products(candidate: _Candidate, node: fx.Node, root: fx.GraphModule) -> None:
    """Follow the parameter through reshapes and slices to the products that read it, and set the summed axis.

    Each op runs on a meta tensor with the parameter's shape and strides: from the operand's size and stride along the
    summed axis, `axis_of` finds which axis of the parameter that was.
    """
    own = candidate.parameter
    meta = torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device="meta")
    todo: list[tuple[fx.Node, Any]] = [(node, meta)]
    while todo:
        source, value = todo.pop()
        for user in source.users:
            row = row_of(user, root)
            if row is not None and (row.name in PRODUCTS or row.name == "einsum"):
                axis = _summed_axis(user, source, row.name)
                found = axis_of(meta, value, axis) if axis is not None and isinstance(value, Tensor) else None
                candidate.axis = found if candidate.axis is None else candidate.axis
                candidate.is_watched |= found is None
            elif row is not None and row.kind is OpKind.TRANSPARENT:
                todo.append((user, _moved(user, value)))
            elif row is None and user.op != "output":
                candidate.is_watched = True


def _summed_axis(user: fx.Node, source: fx.Node, name: str) -> int | None:
    """The operand's axis, counted from its end, that the product sums over; None if that is not one axis."""
    if name in PRODUCTS:
        return next((axis for axis, operand in zip(PRODUCTS[name], user.args, strict=False) if operand is source), None)
    equation, *operands = user.args
    if not isinstance(equation, str) or "." in equation or "->" not in equation or operands.count(source) != 1:
        return None
    inputs, output = equation.replace(" ", "").split("->")
    letters = inputs.split(",")[operands.index(source)]
    summed = [index for index, letter in enumerate(letters) if letter not in output and inputs.count(letter) > 1]
    return summed[0] - len(letters) if len(summed) == 1 else None


def _moved(user: fx.Node, value: Any) -> Any:
    """The op's result for the operand on the meta device; None if it depends on other values of the graph."""
    if len(user.all_input_nodes) != 1 or not isinstance(value, Tensor):
        return None
    args, kwargs = fx.map_arg((user.args, user.kwargs), lambda node: value)
    try:
        if user.op == "call_method":
            return getattr(args[0], str(user.target))(*args[1:], **kwargs)
        return user.target(*args, **kwargs) if callable(user.target) else None
    except Exception:  # an op that does not support the meta device: the result is unknown
        return None


def _guess_stacks(candidates: list[_Candidate], captured: Captured, additions: _PlanAdditions) -> None:
    """Without an example: assume that sizeable 3-d stacks are weights, `[n, out, in]`.

    The layout is `[n, in, out]` if their module has `is_transposed`, as some expert modules of transformers do.
    """
    total = sum(owned.parameter.numel() for owned in owned_parameters(captured.model))
    sizes: Counter[tuple[type[nn.Module], str]] = Counter()
    for candidate in candidates:
        sizes[type(candidate.owner), candidate.name] += candidate.parameter.numel()
    for candidate in candidates:
        if candidate.axis is not None or not candidate.is_watched:
            continue
        is_sizeable = sizes[type(candidate.owner), candidate.name] >= SIZEABLE * total
        if candidate.parameter.ndim == 3 and min(candidate.parameter.shape) > 1 and is_sizeable:
            candidate.axis = 1 if getattr(candidate.owner, "is_transposed", False) is True else 2
        else:
            additions.note(candidate, UNEXPLAINED)


def _quantized(candidate: _Candidate, additions: _PlanAdditions, config: QuantConfig) -> QuantizedParameter | None:
    """The quantizer of a weight, which is added to the plan; None if it stays float, and then the reason is added."""
    name = candidate.site
    additions.layers += [name, candidate.path]
    wanted = config.resolve("W", name)
    if wanted == config.resolve("W", ""):  # no glob of the config matches the parameter: try its module's name
        wanted = config.resolve("W", candidate.path)
    if config.BACKEND in _INTEGER_LAYERS_ONLY:
        additions.floats[name] = f"{config.BACKEND} takes quantized weights in its integer layers only"
    elif wanted.QUANTIZER.DISABLE:
        additions.floats[name] = SWITCHED_OFF[0]
    elif additions.given is not None and name not in additions.given:
        additions.floats[name] = LEFT_OUT
    else:
        try:
            site = site_of(name, wanted, 0).replace(spec=_spec(wanted, candidate))
            site = site if additions.given is None else additions.given[name]
            # The runtime reads it as float numbers, so any format works.
            quantizer = quantizer_of(site, "virtual", num_rows(candidate.parameter.shape, site.spec.granularity))
        except SpecError as error:
            additions.floats[name] = str(error)
        else:
            additions.sites[name] = site
            return QuantizedParameter(candidate.owner, candidate.name, candidate.path, quantizer)
    return None


def _spec(config: WeightConfig, candidate: _Candidate) -> TensorSpec:
    """Per channel: one scale for each row along the summed axis, so that every output channel has its own."""
    if candidate.axis is None:
        assert candidate.channel_axis is not None
        return spec_of(config, candidate.channel_axis)
    shape, axis = candidate.parameter.shape, candidate.axis
    granularity: PerTensor | PerChannel | PerGroup = PerTensor()
    if config.granularity == "group":
        granularity = PerGroup(axis, config.QUANTIZER.GROUP_SIZE)
    elif config.granularity == "channel":
        # A channel axis alone would share scales between the matrices of a stack; one group along the whole summed axis
        # has a scale per matrix and output channel.
        granularity = PerChannel(1 - axis) if len(shape) == 2 else PerGroup(axis, shape[axis])
    return TensorSpec(config.QUANTIZER.BIT, config.symmetric, granularity)


def _insert(root: fx.GraphModule, node: fx.Node, quantized: QuantizedParameter) -> None:
    name = str(node.target).replace(".", "_") + "_quantized"
    while hasattr(root, name):
        name += "_"
    readers = list(node.users)
    behind = insert_module_after(root, node, name, quantized)
    for reader in readers:
        reader.replace_input_with(node, behind)
