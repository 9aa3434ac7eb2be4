"""Functional batch norm on a module's own statistics -> the module itself, so that folding and training see it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparsebit.graph.nodes.graph_module import NAME_KEY, share_registries, source_path
from sparsebit.graph.rewriting.rewrite import sweep

_PARAMETERS = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_CLASSES: tuple[type[_BatchNorm], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def normalize(graph_module: fx.GraphModule, source: nn.Module) -> fx.GraphModule:
    """Rewrite in place. `source`, the module that the graph was traced from, shows which layer owns the statistics.

    Subclasses of BatchNorm (norm + activation in one layer) trace to `F.batch_norm` with the eval branch taken. Calling
    the owner's base class restores both modes.
    """
    for node in list(graph_module.graph.nodes):
        if node.op == "call_function" and node.target in (F.batch_norm, torch.batch_norm):
            _to_module(node, graph_module, source)
    sweep(graph_module)
    return graph_module


def _to_module(node: fx.Node, graph_module: fx.GraphModule, source: nn.Module) -> None:
    given: dict[str, Any] = {**dict(zip(_PARAMETERS, node.args, strict=False)), **node.kwargs}
    path = _owner_path(given)
    if path is None or not isinstance(given["input"], fx.Node):
        return
    owner = source.get_submodule(source_path(path))
    base = next((kind for kind in _CLASSES if isinstance(owner, kind)), None)
    if base is None or not isinstance(owner, _BatchNorm) or given.get("eps", 1e-5) != owner.eps:
        return
    if any((given.get(name) is None) != (getattr(owner, name) is None) for name in ("running_var", "weight", "bias")):
        return
    # Only a layer that asked for its mode behaves like its base class in both; a frozen norm has one mode.
    if given.get("training", False) is not False or source_path(path) not in graph_module.meta.get("eval_branches", ()):
        return
    name = f"{path}.norm" if path else "norm"
    if not any(called.target == name for called in graph_module.graph.find_nodes(op="call_module")):
        module = base(owner.num_features, owner.eps, owner.momentum, owner.affine, owner.track_running_stats)
        share_registries(module, owner)
        module.train(owner.training)
        graph_module.add_submodule(name, module)
    with graph_module.graph.inserting_before(node):
        new = graph_module.graph.call_module(name, (given["input"],))
    new.meta = {key: value for key, value in node.meta.items() if key != NAME_KEY}  # its name is its path
    node.replace_all_uses_with(new)
    graph_module.graph.erase_node(node)


def _owner_path(given: dict[str, Any]) -> str | None:
    """The module whose own statistics, weight and bias are given, all of them as they are; else None."""
    mean = given.get("running_mean")
    if not isinstance(mean, fx.Node) or mean.op != "get_attr":
        return None
    path = str(mean.target).rpartition(".")[0]
    for name in ("running_mean", "running_var", "weight", "bias"):
        value = given.get(name)
        expected = f"{path}.{name}" if path else name
        if isinstance(value, fx.Node) and (value.op, value.target) != ("get_attr", expected):
            return None
    return path
