"""Functional batch norm on a module's own statistics -> the module itself, so that folding and training see it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparsebit.graph.rewrite import sweep

_PARAMETERS = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_CLASSES: tuple[type[_BatchNorm], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def normalize(graph_module: fx.GraphModule, source: nn.Module) -> fx.GraphModule:
    """Rewrite in place. `source` is the module that the graph was traced from: it tells which layer owns the statistics.

    Subclasses of BatchNorm (norm + activation in one layer) trace to `F.batch_norm` with the eval branch taken. The owner's
    base class gives back both modes.
    """
    for node in list(graph_module.graph.nodes):
        if node.op == "call_function" and node.target in (F.batch_norm, torch.batch_norm):
            _to_module(node, graph_module, source)
    sweep(graph_module)
    return graph_module


def _to_module(node: fx.Node, graph_module: fx.GraphModule, source: nn.Module) -> None:
    given: dict[str, Any] = {**dict(zip(_PARAMETERS, node.args, strict=False)), **node.kwargs}
    mean = given.get("running_mean")
    if not isinstance(mean, fx.Node) or mean.op != "get_attr":
        return
    path = str(mean.target).rpartition(".")[0]
    try:
        owner = source.get_submodule(path)
    except AttributeError:
        return
    base = next((kind for kind in _CLASSES if isinstance(owner, kind)), None)
    if base is None or not isinstance(owner, _BatchNorm) or not isinstance(given["input"], fx.Node):
        return
    module = base(owner.num_features, owner.eps, owner.momentum, owner.affine, owner.track_running_stats)
    module._parameters.update({name: owner._parameters[name] for name in ("weight", "bias")})
    module._buffers.update({name: owner._buffers[name] for name in ("running_mean", "running_var", "num_batches_tracked")})
    module.train(owner.training)
    name = f"{path}.norm" if path else "norm"
    graph_module.add_submodule(name, module)
    with graph_module.graph.inserting_before(node):
        new = graph_module.graph.call_module(name, (given["input"],))
    node.replace_all_uses_with(new)
    graph_module.graph.erase_node(node)
