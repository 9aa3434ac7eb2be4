"""A layer whose output is multiplied by a parameter for each channel (layer scale) -> the layer with the factors in it.

`gamma * (W x + b)` is `(gamma W) x + gamma b`. The parameter becomes ones, for code of the model that still multiplies.
"""

from __future__ import annotations

import math
import operator
from operator import attrgetter

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvNd

from sparsebit.graph.nodes.example import value_of
from sparsebit.graph.nodes.graph_module import module_of
from sparsebit.graph.passes.fold_batchnorm import held_parameters, is_intercepted, is_shared
from sparsebit.graph.rewriting.rewrite import sweep

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_PRODUCTS = (operator.mul, torch.mul, "mul")
_RESHAPES = ("reshape", "view")


def fold_scales(graph_module: fx.GraphModule) -> int:
    """Fold every foldable factor in place; returns how many."""
    found = [node for node in graph_module.graph.nodes if _fold(node, graph_module)]
    if found:
        sweep(graph_module)
    return len(found)


def _fold(product: fx.Node, root: fx.GraphModule) -> bool:
    """Fold a product into a layer, if one operand is the layer's output and the other a factor per channel."""
    is_product = product.op in ("call_function", "call_method") and product.target in _PRODUCTS
    if not is_product or len(product.args) != 2 or product.kwargs:
        return False
    for value, factors in (product.args, product.args[::-1]):
        if not isinstance(value, fx.Node) or not isinstance(factors, fx.Node) or len(value.users) != 1:
            continue
        call = _layer_behind(value, root)
        layer = None if call is None else module_of(call, root)
        if call is None or type(layer) not in _LAYERS or not isinstance(layer, (nn.Linear, _ConvNd)):
            continue
        parameter = _parameter_of(factors, root)
        is_plain = not is_intercepted(layer) and layer._parameters.get("weight") is not None
        if parameter is None or not is_plain or is_shared(call, root):
            continue
        shaped = parameter.reshape(factors.args[1:]) if _is_reshape(factors) else parameter  # type: ignore[arg-type]
        scale = _by_channel(shaped, layer)
        if scale is not None and parameter.dtype == layer.weight.dtype and _keeps_rank(call, layer, shaped.dim()):
            with torch.no_grad():
                for name in ("weight", "bias"):
                    if (old := getattr(layer, name)) is not None:
                        new = (old.double() * scale.reshape(-1, *[1] * (old.dim() - 1))).to(old.dtype)
                        setattr(layer, name, nn.Parameter(new, requires_grad=old.requires_grad))
                parameter.fill_(1.0)
            parameter.requires_grad_(False)  # the layer's weight is trained in its place
            product.replace_all_uses_with(value)
            return True
    return False


def _layer_behind(value: fx.Node, root: fx.GraphModule) -> fx.Node | None:
    """The call that produces the value. Dropout after it is skipped, since a factor may be moved before dropout."""
    while type(module_of(value, root)) is nn.Dropout:
        source = value.args[0]
        if not isinstance(source, fx.Node) or len(source.users) != 1:
            return None
        value = source
    return value if value.op == "call_module" else None


def _parameter_of(factors: fx.Node, root: fx.GraphModule) -> nn.Parameter | None:
    """The parameter that a node reads, reshaped or not, if nothing else reads it."""
    source = factors.args[0] if _is_reshape(factors) else factors
    if not isinstance(source, fx.Node) or source.op != "get_attr" or len(source.users) != 1 or len(factors.users) != 1:
        return None
    parameter = attrgetter(str(source.target))(root)
    if not isinstance(parameter, nn.Parameter) or not parameter.is_floating_point():
        return None
    reads = [node for node in root.graph.find_nodes(op="get_attr") if attrgetter(str(node.target))(root) is parameter]
    return parameter if held_parameters(root)[id(parameter)] <= 1 and len(reads) == 1 else None


def _is_reshape(node: fx.Node) -> bool:
    is_static = all(isinstance(size, int) for size in node.args[1:])
    return node.op == "call_method" and node.target in _RESHAPES and is_static and not node.kwargs


def _by_channel(factors: Tensor, layer: nn.Linear | _ConvNd) -> Tensor | None:
    """The factors as `(outputs,)`, if that is how they are spread over the output of the layer."""
    outputs = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    behind = 0 if isinstance(layer, nn.Linear) else layer.weight.dim() - 2  # axes behind that of the channels
    wanted = (outputs, *[1] * behind)
    is_spread = factors.shape[-len(wanted) :] == wanted and math.prod(factors.shape) == outputs
    return factors.detach().reshape(-1).double() if is_spread else None


def _keeps_rank(call: fx.Node, layer: nn.Linear | _ConvNd, rank: int) -> bool:
    """Whether multiplying by factors with `rank` axes adds no axis to the output.

    Without an example the output is assumed to have the fewest axes that such a layer's output can have.
    """
    output = value_of(call)
    return rank <= (output.dim() if isinstance(output, Tensor) else layer.weight.dim() - 1)
