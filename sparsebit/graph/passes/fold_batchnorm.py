"""conv / linear / transposed conv followed by batch norm -> one layer that computes the same in eval mode."""

from __future__ import annotations

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from sparsebit.graph.patterns import Match, MatchingNode, module_of
from sparsebit.graph.rewrite import ReplacePatternBase


def folded_parameters(layer: nn.Module, norm: _BatchNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias of `layer` with `norm` (its running statistics) multiplied in.

    W' = W * g/sqrt(v+eps) along the output channels, b' = (b - m) * g/sqrt(v+eps) + beta.
    """
    assert isinstance(layer, (_ConvNd, nn.Linear)) and norm.running_mean is not None and norm.running_var is not None
    # float64: the running variance of dead channels is tiny, and the product is stored for good.
    mean, variance = norm.running_mean.double(), norm.running_var.double()
    gamma = norm.weight.double() if norm.weight is not None else torch.ones_like(mean)
    beta = norm.bias.double() if norm.bias is not None else torch.zeros_like(mean)
    factor = gamma / torch.sqrt(variance + norm.eps)
    bias = layer.bias.double() if layer.bias is not None else torch.zeros_like(mean)
    weight = layer.weight.double() * _along_outputs(layer, factor)
    return weight.to(layer.weight.dtype), ((bias - mean) * factor + beta).to(layer.weight.dtype)


def fold_into(layer: nn.Module, norm: _BatchNorm) -> None:
    """Give `layer` the folded weight and bias, in place."""
    weight, bias = folded_parameters(layer, norm)
    requires_grad = bool(layer.weight.requires_grad)
    layer.weight = nn.Parameter(weight.detach(), requires_grad=requires_grad)
    layer.bias = nn.Parameter(bias.detach(), requires_grad=requires_grad)


def can_fold(layer: nn.Module | None, norm: nn.Module | None) -> bool:
    if not isinstance(layer, (_ConvNd, nn.Linear)) or not isinstance(norm, _BatchNorm) or norm.running_mean is None:
        return False
    channels = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    return channels == norm.num_features


class FoldBatchNorm(ReplacePatternBase):
    """Folds wherever the layer feeds the norm alone, is called once, and shares its weight with nobody."""

    nodes = (
        MatchingNode("layer", types=(_ConvNd, nn.Linear)),
        MatchingNode("norm", types=(_BatchNorm,), inputs=("layer",)),
    )

    def replace(self, match: Match, graph_module: fx.GraphModule) -> dict[str, fx.Node]:
        layer, norm = module_of(match["layer"], graph_module), module_of(match["norm"], graph_module)
        calls = [n for n in graph_module.graph.nodes if n.op == "call_module" and n.target == match["layer"].target]
        if not can_fold(layer, norm) or len(match["layer"].users) != 1 or len(calls) != 1:
            return {}
        assert layer is not None and isinstance(norm, _BatchNorm)
        if sum(parameter is layer.weight for module in graph_module.modules() for parameter in module._parameters.values()) > 1:
            return {}
        fold_into(layer, norm)
        return {"norm": match["layer"]}


def fold_batchnorm(graph_module: fx.GraphModule) -> int:
    """Fold every foldable batch norm in place; gives how many."""
    return FoldBatchNorm().apply(graph_module)


def _along_outputs(layer: nn.Module, factor: torch.Tensor) -> torch.Tensor:
    """`factor` (out,) shaped to multiply the layer's weight along its output channels."""
    assert isinstance(layer, (_ConvNd, nn.Linear))
    if not isinstance(layer, _ConvTransposeNd):
        return factor.reshape(-1, *([1] * (layer.weight.dim() - 1)))
    # (in, out/groups, k…): the input block of group g meets the factors of group g.
    per_input = factor.reshape(layer.groups, 1, -1).expand(-1, layer.in_channels // layer.groups, -1)
    return per_input.reshape(layer.in_channels, -1, *([1] * (layer.weight.dim() - 2)))
