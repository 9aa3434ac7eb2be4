"""Layers and adds that the runtime executes in integers get its arithmetic: int32 biases, its kernels' own steps."""

from __future__ import annotations

from torch import fx

from sparsebit.deploy.runtimes import RuntimeProfile
from sparsebit.graph.capture import Captured, Region
from sparsebit.numerics.spec import PerChannel
from sparsebit.quantization.ops.bias import BiasRounding
from sparsebit.quantization.ops.integer_ops import IntegerAdd, IntegerLayer, IntegerMultiply
from sparsebit.quantization.ops.quant_opr import GatedQuantOpr, QIdentity, QShared, QuantOpr, WeightedQuantOpr
from sparsebit.quantization.ops.table import input_argument, row_of
from sparsebit.quantization.placement import split_site
from sparsebit.quantization.quantizers.base import Quantizer, is_known

_LAYERS = frozenset({"conv", "linear"})
_CLIPS = frozenset({"relu", "relu6", "hardtanh"})  # they commute with rounding on a grid that holds their ends


def attach_integer_ops(captured: Captured, profile: RuntimeProfile) -> None:
    """In place, after the quantizers are there; nothing where the runtime adds biases in float."""
    if profile.bias != "int32":
        return
    is_exact = profile.executes == "onnxruntime"
    calls: dict[WeightedQuantOpr, list[tuple[Quantizer | None, Quantizer | None]]] = {}
    for region in captured.regions.values():
        for node in list(region.graph_module.graph.nodes):
            layer = _module(node, region)
            if isinstance(layer, WeightedQuantOpr):
                pair = (_input_quantizer(node, layer, region), _output_quantizer(node, region))
                calls.setdefault(layer, []).append(pair)
            elif isinstance(layer, GatedQuantOpr) and is_exact:
                _attach_product(node, layer, region)
            elif is_exact:
                _attach_add(node, region)
        region.graph_module.recompile()
    for loose in captured.loose.values():
        if isinstance(loose.module, WeightedQuantOpr):
            calls.setdefault(loose.module, []).append((loose.module.input_quantizer, None))
    for layer, pairs in calls.items():
        source, output = pairs[0]
        if source is None or any(pair[0] is not source for pair in pairs) or not _fits(layer, source):
            continue
        if getattr(layer.op, "bias", None) is not None:
            name, _ = split_site(layer.weight_quantizer.name)
            layer.bias_rounding = BiasRounding(f"{name}.bias", source, layer.weight_quantizer)
        if is_exact:
            output = output if all(pair[1] is output for pair in pairs) else None
            layer.integer = IntegerLayer(source, layer.weight_quantizer, output)
        layer.train(layer.training)


def _attach_add(node: fx.Node, region: Region) -> None:
    """add(QIdentity, QIdentity) + relu + QIdentity."""
    root = region.graph_module
    row = row_of(node, root) if node.op in ("call_function", "call_method") else None
    if row is None or row.name != "add" or len(node.args) != 2 or node.kwargs:
        return
    left, right = (_quantizer_of(source, region) for source in node.args)
    output = _output_quantizer(node, region)
    if left is None or right is None or output is None or hasattr(root, node.name):
        return
    if any(q.spec.granularity.kind != "tensor" or q.spec.bits != 8 for q in (left, right, output)):
        return
    root.add_submodule(node.name, IntegerAdd(node.target, left, right, output).train(root.training))
    node.op, node.target = "call_module", node.name


def _attach_product(node: fx.Node, layer: GatedQuantOpr, region: Region) -> None:
    source, output = _input_quantizer(node, layer, region), _output_quantizer(node, region)
    if source is not None and output is not None:
        layer.product = IntegerMultiply(source, layer.gate_quantizer, output).train(layer.training)


def _module(node: fx.Node, region: Region) -> object:
    return region.graph_module.get_submodule(str(node.target)) if node.op == "call_module" else None


def _quantizer_of(source: object, region: Region) -> Quantizer | None:
    """The quantizer that alone made this value."""
    module = _module(source, region) if isinstance(source, fx.Node) else None
    return module.input_quantizer if isinstance(module, (QIdentity, QShared)) else None


def _input_quantizer(node: fx.Node, layer: QuantOpr, region: Region) -> Quantizer | None:
    """The quantizer inside the layer, or the one that stands alone right in front of it."""
    if not layer.input_quantizer.fake_fused:
        return layer.input_quantizer
    place = input_argument(layer.row, node.args, node.kwargs, is_module=True)
    if place is None:
        return None
    return _quantizer_of(node.kwargs[place] if isinstance(place, str) else node.args[place], region)


def _output_quantizer(node: fx.Node, region: Region) -> Quantizer | None:
    """The quantizer behind the op, with at most clipping in between."""
    while len(node.users) == 1:
        node = next(iter(node.users))
        found = _quantizer_of(node, region)
        if found is not None:
            return found
        row = row_of(node, region.graph_module)
        if row is None or row.name not in _CLIPS:
            return None
    return None


def _fits(layer: WeightedQuantOpr, quantizer: Quantizer) -> bool:
    """One scale for the input, at most one per output channel for the weight, both of 8 bits or fewer."""
    weight, feature = layer.weight_quantizer.spec, quantizer.spec
    return (
        layer.row.name in _LAYERS
        and all(is_known(q) for q in (layer.weight_quantizer, quantizer))
        and not layer.weight_quantizer.fake_fused
        and feature.granularity.kind == "tensor"
        and (weight.granularity.kind == "tensor" or weight.granularity == PerChannel(0))
        and weight.symmetric
        and max(weight.bits, feature.bits) <= 8
    )
