"""Finds every parameter of a captured model: its name in the original, its owner, and the quantizer that reads it."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

from torch import Tensor, fx, nn

from sparsebit.graph.nodes.graph_module import module_of
from sparsebit.graph.nodes.value_kinds import static_values
from sparsebit.graph.ops.op_table import weight_argument
from sparsebit.graph.region import Region
from sparsebit.quantization.ops.parameter_reads import QuantizedParameter
from sparsebit.quantization.ops.quant_opr import FunctionalWeightedQuantOpr, QIdentity, QuantOpr, WeightedQuantOpr
from sparsebit.quantization.quantizers.base import Quantizer


class OwnedParameter(NamedTuple):
    """`path`: of the owning module in the original model; `layer`: the op that wraps that module, if any."""

    path: str
    name: str
    parameter: nn.Parameter
    owner: nn.Module
    layer: QuantOpr | None

    @property
    def full_name(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name


def owned_parameters(model: nn.Module) -> list[OwnedParameter]:
    """Every parameter once, under its first name; scales that quantizers learn are not parameters of the model."""
    found: dict[int, OwnedParameter] = {}
    for path, module, layer in _modules(model):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), OwnedParameter(path, name, parameter, module, layer))
    return list(found.values())


def quantizers_of_parameters(model: nn.Module) -> dict[int, Quantizer]:
    """By the parameter's id, the quantizer through which the model reads it: as a layer's weight, as the weight
    argument of a function, or as an operand. For a weight computed from parameters (a parametrization), these
    parameters count.
    """
    found: dict[int, Quantizer] = {}
    for module in model.modules():
        if isinstance(module, WeightedQuantOpr):
            found.update((id(weight), module.weight_quantizer) for weight in _weights_of(module))
        elif isinstance(module, QuantizedParameter):
            found[id(module.parameter)] = module.weight_quantizer
        elif isinstance(module, fx.GraphModule):
            static = static_values(module.graph)
            for node, quantizer in _reads(module):
                for parameter in _parameters_behind(node, module) if node in static else ():
                    found.setdefault(id(parameter), quantizer)
    return found


def _modules(
    module: nn.Module, path: str = "", layer: QuantOpr | None = None, seen: set[int] | None = None
) -> Iterator[tuple[str, nn.Module, QuantOpr | None]]:
    """Modules with their paths in the original model, without the wrappers that capture and quantization add."""
    seen = set() if seen is None else seen
    if id(module) in seen or isinstance(module, Quantizer | QuantizedParameter | QIdentity):
        return
    seen.add(id(module))
    if isinstance(module, Region):
        yield from _modules(module.graph_module, path, layer, seen)
        return
    if isinstance(module, QuantOpr):
        if isinstance(module.op, nn.Module):
            yield from _modules(module.op, path, module, seen)
        return
    yield path, module, layer
    for name, child in module._modules.items():
        if child is not None:
            yield from _modules(child, f"{path}.{name}" if path else name, layer, seen)


def _weights_of(layer: WeightedQuantOpr) -> list[nn.Parameter]:
    """The parameter that is the layer's weight, or those from which it is computed."""
    weight = layer.op._parameters.get(layer.row.weight or "weight")
    if weight is not None:
        return [weight]
    return [p for name, p in layer.op.named_parameters() if name.rpartition(".")[2] != "bias" and ".bias" not in name]


def _reads(root: fx.GraphModule) -> Iterator[tuple[fx.Node, Quantizer]]:
    """The node before each quantizer of the graph."""
    for node in root.graph.nodes:
        module = module_of(node, root)
        if isinstance(module, FunctionalWeightedQuantOpr):
            place = weight_argument(module.row, node.args, node.kwargs)
            source = node.kwargs.get(place) if isinstance(place, str) else node.args[place or 0]
            if place is not None and isinstance(source, fx.Node):
                yield source, module.weight_quantizer
        elif isinstance(module, QIdentity) and node.args and isinstance(node.args[0], fx.Node):
            yield node.args[0], module.input_quantizer


def _parameters_behind(node: fx.Node, root: fx.GraphModule) -> list[Tensor]:
    """The parameters that a value is computed from, if it does not depend on any input."""
    behind = [node]
    for current in behind:  # the list grows while it is read
        behind += [source for source in current.all_input_nodes if source not in behind]
    values = (attrgetter(str(current.target))(root) for current in behind if current.op == "get_attr")
    return [value for value in values if isinstance(value, nn.Parameter)]
