"""conv / linear / transposed conv followed by batch norm -> one layer that computes the same in eval mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from operator import attrgetter

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from sparsebit.errors import CaptureError
from sparsebit.graph.nodes.absorbed import Absorbed
from sparsebit.graph.nodes.example import value_of
from sparsebit.graph.nodes.graph_module import CapturedGraph, module_of
from sparsebit.graph.nodes.value_kinds import python_values
from sparsebit.graph.rewriting.patterns import Match, MatchingNode
from sparsebit.graph.rewriting.rewrite import ReplacePatternBase

# Exact classes: a subclass may compute anything. The dimensions must agree, else the norm scales another axis.
_NORMS: dict[type, tuple[type[nn.Module], ...]] = {
    nn.Linear: (nn.BatchNorm1d,),
    nn.modules.linear.NonDynamicallyQuantizableLinear: (nn.BatchNorm1d,),
    nn.Conv1d: (nn.BatchNorm1d, nn.SyncBatchNorm),
    nn.Conv2d: (nn.BatchNorm2d, nn.SyncBatchNorm),
    nn.Conv3d: (nn.BatchNorm3d, nn.SyncBatchNorm),
    nn.ConvTranspose1d: (nn.BatchNorm1d, nn.SyncBatchNorm),
    nn.ConvTranspose2d: (nn.BatchNorm2d, nn.SyncBatchNorm),
    nn.ConvTranspose3d: (nn.BatchNorm3d, nn.SyncBatchNorm),
}


def fold_factor(norm: _BatchNorm) -> torch.Tensor:
    """The factor of `norm` for each channel: `g/sqrt(v+eps)`, float64 `(C,)`."""
    assert norm.running_var is not None
    # float64: the running variance of dead channels is tiny, and the product is stored for good.
    variance = norm.running_var.double()
    gamma = norm.weight.double() if norm.weight is not None else torch.ones_like(variance)
    return gamma / torch.sqrt(variance + norm.eps)


def folded_parameters(layer: nn.Module, norm: _BatchNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias of `layer` with `norm` (its running statistics) multiplied in.

    W' = W * g/sqrt(v+eps) along the output channels, b' = (b - m) * g/sqrt(v+eps) + beta.
    """
    assert isinstance(layer, (_ConvNd, nn.Linear)) and norm.running_mean is not None
    factor, mean = fold_factor(norm), norm.running_mean.double()
    beta = norm.bias.double() if norm.bias is not None else torch.zeros_like(mean)
    bias = layer.bias.double() if layer.bias is not None else torch.zeros_like(mean)
    weight = layer.weight.double() * _along_outputs(layer, factor)
    return weight.to(layer.weight.dtype), ((bias - mean) * factor + beta).to(layer.weight.dtype)


def fold_into(layer: nn.Module, norm: _BatchNorm) -> None:
    """Give `layer` the folded weight and bias, in place; `norm` becomes an identity, for code that still calls it."""
    weight, bias = folded_parameters(layer, norm)
    requires_grad = bool(layer.weight.requires_grad)
    layer.weight = nn.Parameter(weight.detach(), requires_grad=requires_grad)
    layer.bias = nn.Parameter(bias.detach(), requires_grad=requires_grad)
    neutralize(norm)


def neutralize(norm: _BatchNorm) -> None:
    """Make the norm an identity, in place, because layers now compute its part."""
    with torch.no_grad():
        neutral = {"running_mean": 0.0, "running_var": 1.0 - norm.eps, "weight": 1.0, "bias": 0.0}
        for name, value in neutral.items():
            if getattr(norm, name) is not None:
                getattr(norm, name).fill_(value)
    norm.__class__ = _FOLDED[type(norm)]


class Folded(Absorbed):
    """A norm that was folded into the layer before it: an identity, in train mode too."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input


class FoldedBatchNorm1d(Folded, nn.BatchNorm1d):
    """Returns its input."""


class FoldedBatchNorm2d(Folded, nn.BatchNorm2d):
    """Returns its input."""


class FoldedBatchNorm3d(Folded, nn.BatchNorm3d):
    """Returns its input."""


class FoldedSyncBatchNorm(Folded, nn.SyncBatchNorm):
    """Returns its input."""


_FOLDED: dict[type, type] = {
    nn.BatchNorm1d: FoldedBatchNorm1d,
    nn.BatchNorm2d: FoldedBatchNorm2d,
    nn.BatchNorm3d: FoldedBatchNorm3d,
    nn.SyncBatchNorm: FoldedSyncBatchNorm,
}


def can_fold(layer: nn.Module | None, norm: nn.Module | None) -> bool:
    """Whether `norm` after `layer` scales the layer's output channels by known constants."""
    if type(norm) not in _NORMS.get(type(layer), ()) or not isinstance(norm, _BatchNorm) or norm.running_mean is None:
        return False
    assert layer is not None
    if is_intercepted(layer) or is_intercepted(norm):
        return False
    # A weight that is computed at every call (weight norm, pruning) would undo the folding.
    if not isinstance(layer, (_ConvNd, nn.Linear)) or layer._parameters.get("weight") is None:
        return False
    return (layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels) == norm.num_features


def is_intercepted(module: nn.Module) -> bool:
    """Whether a user's code runs around the module's forward: hooks, or a forward that was put onto the instance."""
    registries = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    hooks = (hook for registry in registries for hook in registry.values())
    return "forward" in module.__dict__ or any(not _is_own(hook) for hook in hooks)


def _is_own(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("sparsebit.")


class FoldBatchNorm(ReplacePatternBase):
    """Folds wherever the layer feeds the norm alone, both are called once, and no other module shares their weights."""

    nodes = (
        MatchingNode("layer", types=(_ConvNd, nn.Linear)),
        MatchingNode("norm", types=(_BatchNorm,), inputs=("layer",)),
    )

    def replace(self, match: Match, graph_module: fx.GraphModule) -> dict[str, fx.Node]:
        layer, norm = module_of(match["layer"], graph_module), module_of(match["norm"], graph_module)
        if not can_fold(layer, norm) or not feeds_alone(match["layer"], match["norm"]):
            return {}
        assert layer is not None and isinstance(norm, _BatchNorm)
        if any(is_shared(match[name], graph_module) for name in match):
            return {}
        if isinstance(layer, nn.Linear):
            rank = _rank(match["layer"])
            if rank not in (2, None):  # (N, C, L): the norm's channels are not the layer's
                return {}
            if rank is None:
                layer.register_forward_pre_hook(_expect_matrix)
        fold_into(layer, norm)
        return {"norm": match["layer"]}


def fold_batchnorm(graph_module: fx.GraphModule) -> int:
    """Fold every foldable batch norm in place; returns how many."""
    return FoldBatchNorm().apply(graph_module)


def feeds_alone(layer: fx.Node, norm: fx.Node) -> bool:
    """Whether only that node reads the layer's values (its shape, which a norm keeps, may be read)."""
    others = layer.users.keys() - {norm}
    return not others or others <= python_values(layer.graph)


def is_shared(node: fx.Node, root: fx.GraphModule) -> bool:
    """Whether a change of the module would affect anything besides this call."""
    module = module_of(node, root)
    calls = [other for other in root.graph.find_nodes(op="call_module") if module_of(other, root) is module]
    if len(calls) > 1 or node.target in root.meta.get("shared", ()):
        return True
    assert module is not None
    parts = root.source.modules() if isinstance(root, CapturedGraph) else [module]
    if not any(part._parameters is module._parameters for part in parts):
        return True  # the source's own code would not see the folding
    # A lifted layer and the block that it was lifted from hold their parameters in one dict.
    registries = {id(part._parameters): part._parameters for part in root.modules()}.values()
    held = Counter(id(parameter) for registry in registries for parameter in registry.values())
    own = {id(parameter) for parameter in module.parameters()}
    return any(held[one] > 1 for one in own) or any(id(value) in own for value in _read_alone(root))


def _read_alone(root: fx.GraphModule) -> Iterator[object]:
    """The parameters whose numbers the graph reads outside of layers; reading a shape alone does not count."""
    python = python_values(root.graph)
    for node in root.graph.find_nodes(op="get_attr"):
        if not node.users.keys() <= python:
            yield attrgetter(str(node.target))(root)


def _rank(node: fx.Node) -> int | None:
    example = value_of(node)
    return example.dim() if isinstance(example, torch.Tensor) else None


def _expect_matrix(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    """A hook for a folded linear layer whose input was not known to be (N, C)."""
    if args[0].dim() != 2:
        raise CaptureError(
            f"a linear layer folded with its batch norm for 2-D inputs got one of shape {tuple(args[0].shape)}; "
            "capture the model with example_inputs of such a shape, or do not fold (SCHEDULE.FUSE_BN: false)"
        )


def _along_outputs(layer: nn.Module, factor: torch.Tensor) -> torch.Tensor:
    """`factor` (out,) shaped to multiply the layer's weight along its output channels."""
    assert isinstance(layer, (_ConvNd, nn.Linear))
    if not isinstance(layer, _ConvTransposeNd):
        return factor.reshape(-1, *([1] * (layer.weight.dim() - 1)))
    # (in, out/groups, k…): the input block of group g meets the factors of group g.
    per_input = factor.reshape(layer.groups, 1, -1).expand(-1, layer.in_channels // layer.groups, -1)
    return per_input.reshape(layer.in_channels, -1, *([1] * (layer.weight.dim() - 2)))
