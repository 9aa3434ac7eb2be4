"""Functional calls on a module's own tensors -> layers, so that folding, naming and training see them.

Layers with a forward of their own trace to such calls: same-padding convolutions to `F.conv2d(x, self.weight, …)`,
subclasses of BatchNorm (norm + activation in one layer) to `F.batch_norm` with the eval branch taken. The new layers
hold the same parameter objects, and where possible share the owner's registry, so that later changes reach both.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from sparsebit.graph.nodes.graph_module import NAME_KEY, CapturedGraph, share_registries, source_path
from sparsebit.graph.rewriting.rewrite import sweep

_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_LAYERS: dict[Any, tuple[type[nn.Module], tuple[str, ...]]] = {
    F.conv1d: (nn.Conv1d, _CONV),
    F.conv2d: (nn.Conv2d, _CONV),
    F.conv3d: (nn.Conv3d, _CONV),
    F.conv_transpose1d: (nn.ConvTranspose1d, _TRANSPOSED),
    F.conv_transpose2d: (nn.ConvTranspose2d, _TRANSPOSED),
    F.conv_transpose3d: (nn.ConvTranspose3d, _TRANSPOSED),
    F.linear: (nn.Linear, ("input", "weight", "bias")),
}
_LAYERS_BY_KIND = dict(_LAYERS.values())
_NORM_PARAMETERS = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_NORMS: tuple[type[_BatchNorm], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def lift_functional_layers(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Rewrite in place every call whose weight and bias are parameters themselves, and whose other arguments are fixed.

    The layer is placed below the owner of its weight: `stem.weight` -> `stem.conv`. Equal calls share one layer.
    """
    layers: dict[Any, str] = {}
    for node in list(graph_module.graph.nodes):
        if node.op == "call_function" and node.target in _LAYERS:
            _lift(node, graph_module, layers)
    sweep(graph_module)
    return graph_module


def lift_functional_norms(graph_module: fx.GraphModule, source: nn.Module) -> fx.GraphModule:
    """Rewrite batch norms in place. `source`, the module that the graph was traced from, shows which layer owns the
    statistics. Calling the owner's base class restores both modes.
    """
    for node in list(graph_module.graph.nodes):
        if node.op == "call_function" and node.target in (F.batch_norm, torch.batch_norm):
            _lift_norm(node, graph_module, source)
    sweep(graph_module)
    return graph_module


def _lift(node: fx.Node, graph_module: fx.GraphModule, layers: dict[Any, str]) -> None:
    kind, names = _LAYERS[node.target]
    given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    source, weight, bias = given.pop("input", None), given.pop("weight", None), given.pop("bias", None)
    if not isinstance(source, fx.Node) or not _is_parameter(weight, graph_module):
        return
    if bias is not None and not _is_parameter(bias, graph_module):
        return
    if kind is nn.Linear and graph_module.get_parameter(str(weight.target)).dim() != 2:
        return  # F.linear also takes a vector, and then returns one value per row
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    if any(isinstance(part, fx.Node) for part in pytree.tree_leaves(options)):
        return
    key = (kind, weight.target, bias.target if bias is not None else None, tuple(sorted(options.items())))
    if key not in layers:
        owner, name = str(weight.target).rpartition(".")[0], "linear" if kind is nn.Linear else "conv"
        layers[key] = _free_name(graph_module, f"{owner}.{name}".lstrip("."))
        graph_module.add_submodule(layers[key], _make(kind, weight, bias, options, graph_module))
    _call_instead(node, layers[key], source)


def _call_instead(node: fx.Node, path: str, source: fx.Node) -> None:
    """Call the module at `path` on `source` in place of the node."""
    with node.graph.inserting_before(node):
        new = node.graph.call_module(path, (source,))
    new.meta = {key: value for key, value in node.meta.items() if key != NAME_KEY}  # its name is its path
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _make(
    kind: type[nn.Module], weight: fx.Node, bias: fx.Node | None, options: dict[str, Any], root: fx.GraphModule
) -> nn.Module:
    """A layer that holds the same parameter objects."""
    values = root.get_parameter(str(weight.target))
    outputs, inputs, groups = values.shape[0], values.shape[1], options.get("groups", 1)
    if kind is nn.Linear:
        sizes: tuple[Any, ...] = (inputs, outputs)
    elif "output_padding" in _LAYERS_BY_KIND[kind]:
        sizes = (outputs, inputs * groups, tuple(values.shape[2:]))
    else:
        sizes = (inputs * groups, outputs, tuple(values.shape[2:]))
    layer = kind(*sizes, bias=False, device="meta", **options)
    layer.weight = values
    layer._parameters["bias"] = root.get_parameter(str(bias.target)) if bias is not None else None
    owner = _owner(weight, bias, root)
    if owner is not None:
        share_registries(layer, owner)
    return layer.train(root.training)


def _owner(weight: fx.Node, bias: fx.Node | None, root: fx.GraphModule) -> nn.Module | None:
    """The module with exactly this weight and bias under these names, so that it is updated together with them."""
    path, _, name = source_path(str(weight.target)).rpartition(".")
    owner = root.source.get_submodule(path) if isinstance(root, CapturedGraph) else None
    if owner is None or name != "weight" or owner._parameters.keys() != {"weight", "bias"}:
        return None
    given = source_path(str(bias.target)) if bias is not None else None
    own = f"{path}.bias".lstrip(".") if owner._parameters["bias"] is not None else None
    return owner if given == own else None


def _is_parameter(node: Any, root: fx.GraphModule) -> bool:
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return False
    try:
        root.get_parameter(str(node.target))
    except AttributeError:
        return False
    return True


def _free_name(root: nn.Module, wanted: str) -> str:
    taken = {name for name, _ in root.named_modules()}
    return next(name for name in [wanted, *(f"{wanted}_{number}" for number in range(1, 1000))] if name not in taken)


def _lift_norm(node: fx.Node, graph_module: fx.GraphModule, source: nn.Module) -> None:
    given: dict[str, Any] = {**dict(zip(_NORM_PARAMETERS, node.args, strict=False)), **node.kwargs}
    path = _statistics_owner(given)
    if path is None or not isinstance(given["input"], fx.Node):
        return
    owner = source.get_submodule(source_path(path))
    base = next((kind for kind in _NORMS if isinstance(owner, kind)), None)
    if base is None or not isinstance(owner, _BatchNorm) or given.get("eps", 1e-5) != owner.eps:
        return
    if any((given.get(name) is None) != (getattr(owner, name) is None) for name in ("running_var", "weight", "bias")):
        return
    # Only a layer whose code reads `self.training` behaves like its base class in both modes; a frozen norm has one.
    if given.get("training", False) is not False or source_path(path) not in graph_module.meta.get("eval_branches", ()):
        return
    name = f"{path}.norm" if path else "norm"
    if not any(called.target == name for called in graph_module.graph.find_nodes(op="call_module")):
        module = base(owner.num_features, owner.eps, owner.momentum, owner.affine, owner.track_running_stats)
        share_registries(module, owner)
        module.train(owner.training)
        graph_module.add_submodule(name, module)
    _call_instead(node, name, given["input"])


def _statistics_owner(given: dict[str, Any]) -> str | None:
    """The path of the module whose own statistics, weight and bias are the arguments; None if there is none."""
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
