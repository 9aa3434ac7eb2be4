"""Layers followed by a batch norm -> layers that compute the same in eval mode.

Three forms: conv / linear / transposed conv whose output a norm reads; convolutions whose concatenation it reads
(MixNet); a linear layer on tokens whose flattened output it reads (LeViT).

A fold changes modules that the model's own code also calls. So it is only made if the layer feeds the norm alone, both
are called once, and no other module or code holds their tensors; the norm becomes an identity (`Folded`), so that code
which still calls it computes the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from sparsebit.errors import CaptureError
from sparsebit.graph.nodes.absorbed import Absorbed
from sparsebit.graph.nodes.example import value_of
from sparsebit.graph.nodes.graph_module import CapturedGraph, module_of
from sparsebit.graph.nodes.value_kinds import python_values
from sparsebit.graph.rewriting.patterns import Match, MatchingNode
from sparsebit.graph.rewriting.rewrite import ReplacePatternBase
from sparsebit.numerics.layer_channels import along_outputs

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
# Norms that only take a batch of images: axis 1 is the channel axis.
_IMAGE_NORMS = (nn.BatchNorm2d, nn.BatchNorm3d)


def fold_factor(norm: _BatchNorm) -> torch.Tensor:
    """The factor of `norm` for each channel: `g/sqrt(v+eps)`, float64 `(C,)`."""
    assert norm.running_var is not None
    # In float64, because the running variance of dead channels is tiny, and the product is stored permanently.
    variance = norm.running_var.double()
    gamma = norm.weight.double() if norm.weight is not None else torch.ones_like(variance)
    return gamma / torch.sqrt(variance + norm.eps)


def fold_into(layer: nn.Module, norm: _BatchNorm) -> None:
    """Fold `norm` with its running statistics into `layer`, in place; `norm` becomes an identity.

    W' = W * g/sqrt(v+eps) along the output channels, b' = (b - m) * g/sqrt(v+eps) + beta.
    """
    assert isinstance(layer, (_ConvNd, nn.Linear)) and norm.running_mean is not None
    factor, mean = fold_factor(norm), norm.running_mean.double()
    beta = norm.bias.double() if norm.bias is not None else torch.zeros_like(mean)
    bias = layer.bias.double() if layer.bias is not None else torch.zeros_like(mean)
    weight = layer.weight.double() * along_outputs(layer, factor)
    requires_grad = bool(layer.weight.requires_grad)
    for name, value in (("weight", weight), ("bias", (bias - mean) * factor + beta)):
        setattr(layer, name, nn.Parameter(value.to(layer.weight.dtype).detach(), requires_grad=requires_grad))
    neutralize(norm)


def neutralize(norm: _BatchNorm) -> None:
    """Make the norm an identity, in place: by its numbers, and by its class, which also holds in train mode."""
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


_FOLDED: dict[type, Any] = {
    kind: type(f"Folded{kind.__name__}", (Folded, kind), {"__module__": __name__})
    for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
}
globals().update({kind.__name__: kind for kind in _FOLDED.values()})  # pickle looks them up by name


def can_fold(layer: nn.Module | None, norm: nn.Module | None) -> bool:
    """Whether `norm` after `layer` scales the layer's output channels by known constants."""
    if type(norm) not in _NORMS.get(type(layer), ()) or not isinstance(norm, _BatchNorm) or norm.running_mean is None:
        return False
    assert isinstance(layer, (_ConvNd, nn.Linear))
    # A weight that is computed at every call (weight norm, pruning) would overwrite the folded one.
    if is_intercepted(layer) or is_intercepted(norm) or layer._parameters.get("weight") is None:
        return False
    return (layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels) == norm.num_features


def is_intercepted(module: nn.Module) -> bool:
    """Whether a user's code runs around the module's forward: hooks, or a forward that was put onto the instance."""
    registries = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    hooks = (hook for registry in registries for hook in registry.values())
    is_own = (str(getattr(hook, "__module__", "")).startswith("sparsebit.") for hook in hooks)
    return "forward" in module.__dict__ or not all(is_own)


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
            example = value_of(match["layer"])
            if not isinstance(example, torch.Tensor):
                layer.register_forward_pre_hook(_expect_matrix)
            elif example.dim() != 2:  # (N, C, L): the norm's channels are not the layer's
                return {}
        fold_into(layer, norm)
        return {"norm": match["layer"]}


class FoldConcatenated(ReplacePatternBase):
    """Folds wherever every part is the output of a convolution that is called once and that nothing else reads."""

    nodes = (
        MatchingNode("cat", types=(torch.cat, torch.concat, torch.concatenate)),
        MatchingNode("norm", types=(_BatchNorm,), inputs=("cat",)),
    )

    def replace(self, match: Match, graph_module: fx.GraphModule) -> dict[str, fx.Node]:
        norm, calls = module_of(match["norm"], graph_module), _parts(match["cat"])
        if type(norm) not in _IMAGE_NORMS or not isinstance(norm, _BatchNorm) or norm.running_mean is None:
            return {}
        if is_intercepted(norm) or not calls or not feeds_alone(match["cat"], match["norm"]):
            return {}
        if any(is_shared(node, graph_module) or not feeds_alone(node, match["cat"]) for node in calls):
            return {}
        layers = [module_of(node, graph_module) for node in calls]
        norms = _split(norm, [int(getattr(layer, "out_channels", 0)) for layer in layers])
        if is_shared(match["norm"], graph_module) or not norms:
            return {}
        if not all(can_fold(layer, part) for layer, part in zip(layers, norms, strict=True)):
            return {}
        for layer, part in zip(layers, norms, strict=True):
            assert layer is not None
            fold_into(layer, part)
        neutralize(norm)
        return {"norm": match["cat"]}


class FoldFlattened(ReplacePatternBase):
    """Folds where the layer's features are the norm's channels, and where nothing else reads more than the layer's
    shape.

    An op that reshapes the norm's output to the layer's output shape (`reshape_as`) is removed too.
    """

    nodes = (
        MatchingNode("layer", types=(nn.Linear,)),
        MatchingNode("flat", types=(torch.flatten, "flatten"), inputs=("layer",)),
        MatchingNode("norm", types=(_BatchNorm,), inputs=("flat",)),
    )

    def replace(self, match: Match, graph_module: fx.GraphModule) -> dict[str, fx.Node]:
        layer, norm = module_of(match["layer"], graph_module), module_of(match["norm"], graph_module)
        if not can_fold(layer, norm) or not _keeps_features(match["flat"], match["layer"]):
            return {}
        back = [node for node in match["layer"].users if _is_shaped_as(node, match["layer"])]
        others = match["layer"].users.keys() - {match["flat"], *back} - python_values(graph_module.graph)
        if others or not feeds_alone(match["flat"], match["norm"]):
            return {}
        if any(is_shared(match[name], graph_module) for name in ("layer", "norm")):
            return {}
        assert layer is not None and isinstance(norm, _BatchNorm)
        fold_into(layer, norm)
        for node in back:
            if node.args[0] is match["norm"]:
                node.replace_all_uses_with(match["layer"])
        return {"norm": match["flat"]}


def fold_batchnorm(graph_module: fx.GraphModule) -> int:
    """Fold every foldable batch norm in place; returns how many."""
    return sum(kind().apply(graph_module) for kind in (FoldBatchNorm, FoldConcatenated, FoldFlattened))


def feeds_alone(layer: fx.Node, norm: fx.Node) -> bool:
    """Whether only that node reads the layer's values (its shape, which a norm keeps, may be read)."""
    others = layer.users.keys() - {norm}
    return not others or others <= python_values(layer.graph)


def is_shared(node: fx.Node, root: fx.GraphModule) -> bool:
    """Whether a change of the module would affect anything other than this call."""
    module = module_of(node, root)
    calls = [other for other in root.graph.find_nodes(op="call_module") if module_of(other, root) is module]
    if len(calls) > 1 or node.target in root.meta.get("shared", ()):
        return True
    assert module is not None
    parts = root.source.modules() if isinstance(root, CapturedGraph) else [module]
    if not any(part._parameters is module._parameters for part in parts):
        return True  # the source's own code would not see the folding
    held, own = held_parameters(root), {id(parameter) for parameter in module.parameters()}
    return any(held[one] > 1 for one in own) or any(id(value) in own for value in _read_alone(root))


def held_parameters(root: nn.Module) -> Counter[int]:
    """By id, the number of registries that hold a parameter. A lifted layer and its block share one registry."""
    registries = {id(part._parameters): part._parameters for part in root.modules()}.values()
    return Counter(id(parameter) for registry in registries for parameter in registry.values())


def _read_alone(root: fx.GraphModule) -> Iterator[object]:
    """The parameters whose values the graph reads outside of layers; reading only a shape does not count."""
    python = python_values(root.graph)
    for node in root.graph.find_nodes(op="get_attr"):
        if not node.users.keys() <= python:
            yield attrgetter(str(node.target))(root)


def _expect_matrix(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    """A hook for a folded linear layer whose input was not known to be (N, C)."""
    if args[0].dim() != 2:
        raise CaptureError(
            f"a linear layer folded with its batch norm for 2-D inputs got one of shape {tuple(args[0].shape)}; "
            "capture the model with example_inputs of such a shape, or do not fold (SCHEDULE.FUSE_BN: false)"
        )


def _parts(cat: fx.Node) -> list[fx.Node]:
    """The module calls that are concatenated along the channels; empty if it concatenates anything else."""
    tensors = cat.args[0] if cat.args else cat.kwargs.get("tensors")
    dim = cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", cat.kwargs.get("axis", 0))
    if dim != 1 or not isinstance(tensors, Sequence):
        return []
    nodes = [node for node in tensors if isinstance(node, fx.Node) and node.op == "call_module"]
    return nodes if len(nodes) == len(set(nodes)) == len(tensors) else []


def _split(norm: _BatchNorm, sizes: Sequence[int]) -> list[_BatchNorm]:
    """The norm of each part; empty if the parts are not the norm's channels."""
    if sum(sizes) != norm.num_features or not all(sizes):
        return []
    norms: list[_BatchNorm] = []
    for end, size in zip(accumulate(sizes), sizes, strict=True):
        part = type(norm)(size, eps=norm.eps, affine=norm.affine)
        for name in ("running_mean", "running_var", "weight", "bias"):
            value = getattr(norm, name)
            if value is not None:
                own = value.detach()[end - size : end].clone()
                setattr(part, name, nn.Parameter(own) if name in ("weight", "bias") else own)
        norms.append(part.eval())
    return norms


def _keeps_features(flat: fx.Node, layer: fx.Node) -> bool:
    """Whether all axes but the last become one: a norm's channels are then the layer's features."""
    given = dict(zip(("start_dim", "end_dim"), flat.args[1:], strict=False)) | dict(flat.kwargs)
    start, end, example = given.get("start_dim", 0), given.get("end_dim", -1), value_of(layer)
    if not isinstance(example, torch.Tensor):
        return bool(start == 0 and end == -2)
    return start in (0, -example.dim()) and end in (-2, example.dim() - 2)


def _is_shaped_as(node: fx.Node, layer: fx.Node) -> bool:
    """Whether the node reads the layer for its shape alone."""
    is_reshape = node.op == "call_method" and node.target in ("reshape_as", "view_as")
    return is_reshape and len(node.args) == 2 and node.args[1] is layer and node.args[0] is not layer
