"""Convolutions whose concatenation a batch norm reads (MixNet) -> convolutions that compute the same in eval mode."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparsebit.graph.nodes.graph_module import module_of
from sparsebit.graph.passes.fold_batchnorm import (
    can_fold,
    feeds_alone,
    fold_into,
    is_intercepted,
    is_shared,
    neutralize,
)
from sparsebit.graph.rewriting.patterns import Match, MatchingNode
from sparsebit.graph.rewriting.rewrite import ReplacePatternBase

# Norms that only take a batch of images: axis 1 is the channel axis.
_NORMS = (nn.BatchNorm2d, nn.BatchNorm3d)


class FoldConcatenated(ReplacePatternBase):
    """Folds wherever every part is the output of a convolution that is called once and that nothing else reads."""

    nodes = (
        MatchingNode("cat", types=(torch.cat, torch.concat, torch.concatenate)),
        MatchingNode("norm", types=(_BatchNorm,), inputs=("cat",)),
    )

    def replace(self, match: Match, graph_module: fx.GraphModule) -> dict[str, fx.Node]:
        norm, calls = module_of(match["norm"], graph_module), _parts(match["cat"])
        if type(norm) not in _NORMS or not isinstance(norm, _BatchNorm) or norm.running_mean is None:
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


def fold_concatenated(graph_module: fx.GraphModule) -> int:
    """Fold the batch norms after concatenated convolutions in place; returns how many."""
    return FoldConcatenated().apply(graph_module)


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
    for start, size in zip([sum(sizes[:place]) for place in range(len(sizes))], sizes, strict=True):
        part = type(norm)(size, eps=norm.eps, affine=norm.affine)
        for name in ("running_mean", "running_var", "weight", "bias"):
            value = getattr(norm, name)
            if value is not None:
                own = value.detach()[start : start + size].clone()
                setattr(part, name, nn.Parameter(own) if name in ("weight", "bias") else own)
        norms.append(part.eval())
    return norms
