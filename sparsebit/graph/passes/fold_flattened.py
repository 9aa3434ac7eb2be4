"""A linear layer on tokens, followed by a batch norm of its flattened output (LeViT) -> one layer, in eval mode."""

from __future__ import annotations

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparsebit.graph.nodes.example import value_of
from sparsebit.graph.nodes.graph_module import module_of
from sparsebit.graph.nodes.value_kinds import python_values
from sparsebit.graph.passes.fold_batchnorm import can_fold, feeds_alone, fold_into, is_shared
from sparsebit.graph.rewriting.patterns import Match, MatchingNode
from sparsebit.graph.rewriting.rewrite import ReplacePatternBase


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


def fold_flattened(graph_module: fx.GraphModule) -> int:
    """Fold the batch norms after flattened linear layers in place; returns how many."""
    return FoldFlattened().apply(graph_module)


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
