"""`F.conv2d(x, self.weight, self.bias, …)` on a module's own parameters -> a layer, so that folding and naming see it.

Layers with a forward of their own (same-padding convolutions, say) trace to such calls.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import fx, nn
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


def lift_functional_layers(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Rewrite in place every call whose weight and bias are parameters as they are and whose other arguments are fixed.

    The layer is filed below the owner of its weight: `stem.weight` -> `stem.conv`. Calls that are alike share a layer.
    """
    layers: dict[Any, str] = {}
    for node in list(graph_module.graph.nodes):
        if node.op == "call_function" and node.target in _LAYERS:
            _lift(node, graph_module, layers)
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
        owner = str(weight.target).rpartition(".")[0]
        layers[key] = _free_name(graph_module, f"{owner}.{_NAMES[kind]}" if owner else _NAMES[kind])
        graph_module.add_submodule(layers[key], _make(kind, weight, bias, options, graph_module))
    with graph_module.graph.inserting_before(node):
        new = graph_module.graph.call_module(layers[key], (source,))
    new.meta = {key: value for key, value in node.meta.items() if key != NAME_KEY}  # its name is its path
    node.replace_all_uses_with(new)
    graph_module.graph.erase_node(node)


_NAMES = {kind: "linear" if kind is nn.Linear else "conv" for kind, _ in _LAYERS.values()}


def _make(
    kind: type[nn.Module], weight: fx.Node, bias: fx.Node | None, options: dict[str, Any], root: fx.GraphModule
) -> nn.Module:
    """The layer around the very same parameters."""
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


_LAYERS_BY_KIND = dict(_LAYERS.values())


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
