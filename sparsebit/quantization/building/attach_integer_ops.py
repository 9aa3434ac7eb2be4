"""Attaches a runtime's integer arithmetic to the layers, adds and products that it executes in integers.

Two levels: a runtime with int32 biases rounds each bias to the grid `input scale * weight scale` (`BiasRounding`); for
ONNX Runtime and XNNPACK (ExecuTorch) the simulation also computes the kernel's own steps, so that its values are equal
bit for bit (`Integer*` and `Xnnpack*` modules of `ops/`). Both need to know the quantizers of a call's input, weight
and output, which this file looks up in the graph. A layer gets nothing if one of its calls has a float input.

Scales and quantizers may change after building (folding, `replace_quantizer`): their callers run `attach_integer_ops`
again, which first removes everything that it added before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, fx, nn

from sparsebit.deploy.runtimes import RuntimeProfile
from sparsebit.graph.capture import Captured
from sparsebit.graph.nodes.graph_module import module_of
from sparsebit.graph.nodes.value_kinds import static_values
from sparsebit.graph.ops.op_table import bias_argument, input_argument, row_of
from sparsebit.graph.region import Region
from sparsebit.numerics.spec import PerChannel
from sparsebit.quantization.ops.bias import BiasRounding
from sparsebit.quantization.ops.integer_ops import (
    IntegerAdd,
    IntegerHardSigmoid,
    IntegerLayer,
    IntegerMultiply,
    IntegerProduct,
    XnnpackAdd,
    XnnpackMean,
    XnnpackProduct,
)
from sparsebit.quantization.ops.quant_opr import (
    FunctionalWeightedQuantOpr,
    GatedQuantOpr,
    QIdentity,
    QShared,
    QuantOpr,
    WeightedQuantOpr,
)
from sparsebit.quantization.ops.repeated_calls import CallArithmetic, CallArithmetics
from sparsebit.quantization.planning.sites import split_site
from sparsebit.quantization.quantizers.base import Quantizer, rounds_by_operator

_Layer = WeightedQuantOpr | FunctionalWeightedQuantOpr
_LAYERS = frozenset({"conv", "linear", "addmm"})
# Between an op and its output quantizer: clipping commutes with rounding if the grid contains the bounds. So do moves,
# before which a program's quantize op is put (`deploy.programs.qdq_program.quantize_moves`).
_CLIPS = frozenset({"relu", "relu6", "hardtanh"})
_MOVES = frozenset({"flatten", "reshape", "permute"})


class _Kernels(NamedTuple):
    """A runtime's arithmetic that is known to the last bit.

    `means`: the pools that are integer means. `needs_output`: layers whose result stays float do not run in integers.
    `by_reciprocal`: floats are quantized by a product with the scale's reciprocal. `between`: ops that may be between a
    layer and the quantizer of its result.
    """

    binary: Mapping[str, type[IntegerAdd]]
    means: frozenset[str] = frozenset()
    needs_output: bool = False
    by_reciprocal: bool = False
    between: frozenset[str] = _CLIPS


_KERNELS: dict[str | None, _Kernels] = {
    "onnxruntime": _Kernels({"add": IntegerAdd, "mul": IntegerProduct}),
    "executorch": _Kernels(
        {"add": XnnpackAdd, "mul": XnnpackProduct},
        means=frozenset({"adaptive_avg_pool"}),
        needs_output=True,
        by_reciprocal=True,
        between=_CLIPS | _MOVES,
    ),
}


def attach_integer_ops(captured: Captured, profile: RuntimeProfile) -> None:
    """Attach the runtime's arithmetic after quantizers were attached or replaced, in place."""
    if profile.bias != "int32":
        return
    # Only calibration sees the bias of a functional call (`F.linear(x, w, b)`): it is carried over to the new parts.
    seen_biases = _detach(captured)
    kernels = _KERNELS.get(profile.executes)
    # All calls of a layer are collected before anything is attached: one call with a float input rules out the others.
    calls: dict[WeightedQuantOpr, list[_Call]] = {}
    for region in captured.regions.values():
        constants = _constants(region)
        for node in list(region.graph_module.graph.nodes):
            layer = _module(node, region)
            if isinstance(layer, WeightedQuantOpr):
                calls.setdefault(layer, []).append(_call_of(node, layer, region, kernels))
            elif isinstance(layer, FunctionalWeightedQuantOpr):
                if _adds_plainly(node, layer, constants):
                    has_bias = bias_argument(layer.row, node.args, node.kwargs) is not None
                    _attach(layer, [_call_of(node, layer, region, kernels)], has_bias=has_bias, kernels=kernels)
            elif kernels is not None:
                _attach_light(node, layer, region, kernels)
        region.graph_module.recompile()
    # Layers that a module's own code calls: no graph shows what reads their output, so the output stays unrounded.
    for loose in captured.loose.values():
        if isinstance(loose.module, WeightedQuantOpr):
            source = loose.module.input_quantizer
            calls.setdefault(loose.module, []).append(_Call(None if source.fake_fused else source))
    for layer, those in calls.items():
        _attach(layer, those, has_bias=layer.stored_bias() is not None, kernels=kernels)
    _note_division(captured, by_reciprocal=kernels is not None and kernels.by_reciprocal)
    for functional, bias in seen_biases.items():
        if functional.bias_rounding is not None:
            functional.bias_rounding.seen = bias


def make_room_for_biases(model: nn.Module) -> None:
    """Raise scales of weights if a layer's bias would otherwise not fit into int32."""
    for layer in model.modules():
        if isinstance(layer, _Layer):
            bias = layer.stored_bias()
            for rounding, _ in layer.arithmetics:
                if bias is not None and rounding is not None:
                    rounding.make_room(bias)


def _detach(captured: Captured) -> dict[FunctionalWeightedQuantOpr, Tensor]:
    """Remove everything that `attach_integer_ops` added; returns the biases recorded during calibration."""
    seen: dict[FunctionalWeightedQuantOpr, Tensor] = {}
    layers = [loose.module for loose in captured.loose.values()]
    for region in captured.regions.values():
        for node in region.graph_module.graph.nodes:
            module = _module(node, region)
            if isinstance(module, IntegerAdd):  # the node was an add or mul, and becomes one again
                region.graph_module.delete_submodule(str(node.target))
                node.op = "call_method" if isinstance(module.op, str) else "call_function"
                node.target = module.op
            elif isinstance(module, XnnpackMean):
                region.graph_module.delete_submodule(str(node.target))
                node.op, node.target = module.replaced
            elif module is not None:
                layers.append(module)
    for layer in layers:
        if isinstance(layer, FunctionalWeightedQuantOpr) and (bias := layer.stored_bias()) is not None:
            seen[layer] = bias
        if isinstance(layer, _Layer):
            layer.bias_rounding = layer.integer = layer.per_call = None
        elif isinstance(layer, GatedQuantOpr):
            layer.product = layer.hard_gate = None
        elif isinstance(layer, (QIdentity, QShared)):
            layer.notes_grid = False
    return seen


def _note_division(captured: Captured, *, by_reciprocal: bool) -> None:
    modules = [loose.module for loose in captured.loose.values()]
    for region in captured.regions.values():
        modules += [module for node in region.graph_module.graph.nodes if (module := _module(node, region)) is not None]
    for quantizer in (part for module in modules for part in module.modules() if isinstance(part, Quantizer)):
        quantizer.by_reciprocal = by_reciprocal and quantizer.target == "activation" and rounds_by_operator(quantizer)


class _Call(NamedTuple):
    """The quantizers of a call's input and output; `front`: the module that produces the input (a `QIdentity`…)."""

    source: Quantizer | None
    output: Quantizer | None = None
    front: object = None


def _call_of(node: fx.Node, layer: QuantOpr, region: Region, kernels: _Kernels | None) -> _Call:
    front = _module(_input_of(node, layer), region)
    between = _CLIPS if kernels is None else kernels.between
    return _Call(_input_quantizer(node, layer, region), _output_quantizer(node, region, between), front)


def _attach(layer: _Layer, calls: Sequence[_Call], *, has_bias: bool, kernels: _Kernels | None) -> None:
    """Attach integer arithmetic to all calls; to none if one of them has a float input.

    Calls are distinguished by their input's quantizer. Two calls with the same input grid and different output grids
    share one `IntegerLayer`, which then leaves the output unrounded.
    """
    outputs: dict[Quantizer, Quantizer | None] = {}
    for call in calls:
        if call.source is None or not _fits(layer, call.source):
            return
        outputs[call.source] = call.output if outputs.get(call.source, call.output) is call.output else None
    is_exact, needs_output = kernels is not None, kernels is not None and kernels.needs_output
    weight, name = layer.weight_quantizer, f"{split_site(layer.weight_quantizer.name)[0]}.bias"
    made = {
        source: (
            BiasRounding(name, source, weight) if has_bias else None,
            IntegerLayer(source, weight, output) if is_exact and (output is not None or not needs_output) else None,
        )
        for source, output in outputs.items()
    }
    if len(made) == 1:
        ((layer.bias_rounding, layer.integer),) = made.values()
    else:
        for call in calls:
            if isinstance(call.front, (QIdentity, QShared)):
                call.front.notes_grid = True
        layer.per_call = CallArithmetics([CallArithmetic(source, *one) for source, one in made.items()])
    layer.train(layer.training)


def _constants(region: Region) -> set[fx.Node]:
    """Values that the file can hold as constants: made of parameters alone, without a quantizer in between."""
    static = static_values(region.graph_module.graph)
    found: set[fx.Node] = set()
    for node in (node for node in region.graph_module.graph.nodes if node in static):
        module = _module(node, region)
        has_quantizer = module is not None and any(isinstance(part, Quantizer) for part in module.modules())
        if not has_quantizer and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def _adds_plainly(node: fx.Node, layer: FunctionalWeightedQuantOpr, constants: set[fx.Node]) -> bool:
    """Whether the call is `x @ weight + bias` without factors, and a bias, if there is one, is constant.

    A kernel takes its int32 bias from the file, and there is no QuantizeLinear to int32: a bias that depends on the
    input stays float, and so does the layer.
    """
    place = bias_argument(layer.row, node.args, node.kwargs)
    bias = node.kwargs[place] if isinstance(place, str) else None if place is None else node.args[place]
    factors = (node.kwargs.get(name, 1) for name in ("alpha", "beta"))
    return (bias is None or bias in constants) and all(factor == 1 for factor in factors)


def _attach_light(node: fx.Node, layer: nn.Module | None, region: Region, kernels: _Kernels) -> None:
    """Everything but layers: additions, products, gates and means."""
    if isinstance(layer, GatedQuantOpr):
        _attach_product(node, layer, region)
        return
    row = row_of(node, region.graph_module)
    if row is not None and row.name in kernels.means:
        _attach_mean(node, layer, region)
    else:
        _attach_binary(node, region, kernels.binary)


def _attach_binary(node: fx.Node, region: Region, kernels: Mapping[str, type[IntegerAdd]]) -> None:
    """Replace the add or mul in `add(QIdentity, QIdentity) + relu + QIdentity` by its integer form."""
    root = region.graph_module
    row = row_of(node, root) if node.op in ("call_function", "call_method") else None
    if row is None or row.name not in kernels or len(node.args) != 2 or node.kwargs or hasattr(root, node.name):
        return
    found = (*(_quantizer_of(source, region) for source in node.args), _output_quantizer(node, region))
    quantizers = [q for q in found if q is not None and _is_plain(q)]
    if len(quantizers) == len(found):
        root.add_submodule(node.name, kernels[row.name](node.target, *quantizers).train(root.training))
        node.op, node.target = "call_module", node.name


def _attach_mean(node: fx.Node, pool: nn.Module | None, region: Region) -> None:
    """Replace an average pool by its integer form."""
    root = region.graph_module
    if not node.args or isinstance(pool, XnnpackMean) or hasattr(root, node.name):
        return
    source, output = _quantizer_of(node.args[0], region), _output_quantizer(node, region, _MOVES)
    if source is None or output is None or not _is_plain(source) or not _is_plain(output):
        return
    made = XnnpackMean(node.target if pool is None else pool, source, output, (node.op, node.target))
    root.add_submodule(node.name, made.train(root.training))
    node.op, node.target = "call_module", node.name


def _is_plain(quantizer: Quantizer) -> bool:
    return quantizer.spec.granularity.kind == "tensor" and quantizer.spec.bits == 8


def _attach_product(node: fx.Node, layer: GatedQuantOpr, region: Region) -> None:
    source, output = _input_quantizer(node, layer, region), _output_quantizer(node, region)
    if source is not None and output is not None:
        layer.product = IntegerMultiply(source, layer.gate_quantizer, output).train(layer.training)
    if source is not None and layer.row.name == "hardswish":
        layer.hard_gate = IntegerHardSigmoid(source, layer.gate_quantizer).train(layer.training)


def _module(node: object, region: Region) -> nn.Module | None:
    return module_of(node, region.graph_module) if isinstance(node, fx.Node) else None


def _quantizer_of(source: object, region: Region) -> Quantizer | None:
    """The quantizer that alone produced this value."""
    module = _module(source, region)
    return module.input_quantizer if isinstance(module, (QIdentity, QShared)) else None


def _input_quantizer(node: fx.Node, layer: QuantOpr, region: Region) -> Quantizer | None:
    """The quantizer inside the layer, or the separate one directly before it."""
    if not layer.input_quantizer.fake_fused:
        return layer.input_quantizer
    return _quantizer_of(_input_of(node, layer), region)


def _input_of(node: fx.Node, layer: QuantOpr) -> object:
    is_module = not isinstance(layer, FunctionalWeightedQuantOpr)
    place = input_argument(layer.row, node.args, node.kwargs, is_module=is_module)
    return None if place is None else node.kwargs[place] if isinstance(place, str) else node.args[place]


def _output_quantizer(node: fx.Node, region: Region, between: frozenset[str] = _CLIPS) -> Quantizer | None:
    """The quantizer after the op, with at most clipping in between."""
    while len(node.users) == 1:
        (node,) = node.users
        row, found = row_of(node, region.graph_module), _quantizer_of(node, region)
        if found is not None or row is None or row.name not in between:
            return found
    return None


def _fits(layer: _Layer, quantizer: Quantizer) -> bool:
    """One scale for the input, at most one per output channel for the weight, both of 8 bits or fewer."""
    weight, activation = layer.weight_quantizer.spec, quantizer.spec
    return (
        layer.row.name in _LAYERS
        and all(rounds_by_operator(q) for q in (layer.weight_quantizer, quantizer))
        and not layer.weight_quantizer.fake_fused
        and activation.granularity.kind == "tensor"
        and (weight.granularity.kind == "tensor" or weight.granularity == PerChannel(layer.row.channel_axis))
        and weight.symmetric
        and weight.format == "integer"
        and max(weight.bits, activation.bits) <= 8
    )
