"""Sums of convolutions of one input -> one convolution: networks that train with branches and run without them.

`conv3(x) + conv1(x) + norm(x)` is linear in x, so one kernel computes it (RepVGG, Ding et al. 2021, section 3.3). The
largest kernel takes in the others; these remain with weights of zero, for code of the model that still calls them.

Terms with other inputs, and branches that cannot be merged, stay in the sum. The kernels are added in float64.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from sparsebit.graph.nodes.absorbed import Absorbed
from sparsebit.graph.nodes.graph_module import module_of
from sparsebit.graph.passes.fold_batchnorm import fold_factor, is_intercepted, is_shared
from sparsebit.graph.rewriting.rewrite import sweep

_NORM_OF: dict[type, type] = {nn.Conv1d: nn.BatchNorm1d, nn.Conv2d: nn.BatchNorm2d, nn.Conv3d: nn.BatchNorm3d}
_SIGNS: dict[object, int] = {operator.add: 1, torch.add: 1, "add": 1, operator.sub: -1, torch.sub: -1, "sub": -1}
_OPERATORS = {1: operator.add, -1: operator.sub}


# Classes of merged layers, which return zeros.
_MERGED: dict[type, Any] = {
    kind: type(f"Merged{kind.__name__}", (Absorbed, kind), {"__module__": __name__})
    for pair in _NORM_OF.items()
    for kind in pair
}
globals().update({kind.__name__: kind for kind in _MERGED.values()})  # pickle looks them up by name


@dataclass(frozen=True)
class _Branch:
    """A term of a sum: a layer and its call, which nothing else reads; `sign`: -1 where it is subtracted."""

    node: fx.Node
    layer: _ConvNd | _BatchNorm
    sign: int


def merge_branches(graph_module: fx.GraphModule) -> int:
    """Merge all mergeable branches in place; returns how many layers were merged into others."""
    count = 0
    for top in list(graph_module.graph.nodes):
        if _is_addition(top) and not _is_inside(top):
            merged = {branch.node for group in _by_input(top, graph_module) for branch in _merge(group)}
            if merged:
                _remove_terms(top, merged)
            count += len(merged)
    if count:
        sweep(graph_module)
    return count


def _is_addition(node: fx.Node) -> bool:
    is_call = node.op in ("call_function", "call_method")
    return is_call and node.target in _SIGNS and len(node.args) == 2 and not node.kwargs


def _is_inside(node: fx.Node) -> bool:
    """Whether the sum is only a part of a longer one."""
    readers = list(node.users)
    return len(readers) == 1 and _is_addition(readers[0])


def _parts(addition: fx.Node, sign: int = 1) -> Iterator[tuple[fx.Node | float, int]]:
    """The terms of a sum, with signs; an inner sum is replaced by its own terms."""
    for part, own in zip(addition.args, (sign, sign * _SIGNS[addition.target]), strict=True):
        if isinstance(part, fx.Node) and _is_addition(part) and len(part.users) == 1:
            yield from _parts(part, own)
        else:
            yield part, own  # type: ignore[misc]


def _by_input(top: fx.Node, root: fx.GraphModule) -> list[list[_Branch]]:
    """The branches of a sum, grouped by their input."""
    found: dict[fx.Node, list[_Branch]] = {}
    for node, sign in _parts(top):
        if not isinstance(node, fx.Node) or len(node.users) != 1 or len(node.args) != 1 or node.kwargs:
            continue
        layer, source = module_of(node, root), node.args[0]
        if type(layer) in _MERGED and isinstance(source, fx.Node):
            assert isinstance(layer, (_ConvNd, _BatchNorm))
            if _is_plain(layer) and not is_shared(node, root):
                found.setdefault(source, []).append(_Branch(node, layer, sign))
    return list(found.values())


def _is_plain(layer: _ConvNd | _BatchNorm) -> bool:
    """Whether the layer computes with constant weights of its own, and no hook is on it."""
    if is_intercepted(layer):
        return False
    if isinstance(layer, _BatchNorm):
        return layer.running_mean is not None
    has_weight = layer._parameters.get("weight") is not None
    return has_weight and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def _merge(branches: list[_Branch]) -> list[_Branch]:
    """Merge the branches into the convolution with the largest kernel; returns those that were merged."""
    hosts = [branch.layer for branch in branches if isinstance(branch.layer, _ConvNd) and branch.sign > 0]
    if not hosts:
        return []
    host = max(hosts, key=lambda layer: torch.Size(layer.kernel_size).numel())
    merged = []
    for branch in branches:
        kernel = None if branch.layer is host else _kernel_for(host, branch.layer)
        if kernel is not None:
            _add(host, *(branch.sign * values for values in kernel))
            _make_zero(branch.layer)
            merged.append(branch)
    return merged


def _kernel_for(host: _ConvNd, layer: _ConvNd | _BatchNorm) -> tuple[Tensor, Tensor] | None:
    """The layer as a weight of the host's shape and a bias, float64; None if the host cannot compute it."""
    weight = torch.zeros(host.weight.shape, dtype=torch.float64, device=host.weight.device)
    if isinstance(layer, _BatchNorm):
        return _kernel_of_norm(host, layer, weight)
    if type(layer) is not type(host) or layer.weight.dtype != host.weight.dtype:
        return None
    alike = ("stride", "dilation", "groups", "in_channels", "out_channels")
    if any(getattr(layer, name) != getattr(host, name) for name in alike):
        return None
    places: list[slice] = []
    for (size, pad, step), (most, room, _) in zip(_sizes(layer), _sizes(host), strict=True):
        start, rest = divmod(room - pad, step)
        # Merged only if the output size is the same, and each tap of the small kernel falls on a tap of the host's.
        if rest or not 0 <= start <= most - size or 2 * (room - pad) != step * (most - size):
            return None
        places.append(slice(start, start + size))
    weight[(slice(None), slice(None), *places)] = layer.weight.double()
    bias = torch.zeros(host.out_channels, dtype=torch.float64, device=weight.device)
    return weight, bias if layer.bias is None else layer.bias.double()


def _kernel_of_norm(host: _ConvNd, norm: _BatchNorm, weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """A norm as a kernel: a diagonal of factors at the centre tap, which reads the position of the output."""
    keeps_size = all(2 * pad == step * (size - 1) for size, pad, step in _sizes(host))
    is_fit = type(norm) is _NORM_OF.get(type(host)) and norm.num_features == host.in_channels == host.out_channels
    if not is_fit or not keeps_size or any(stride != 1 for stride in host.stride):
        return None
    factor = fold_factor(norm)
    assert norm.running_mean is not None
    beta = torch.zeros_like(factor) if norm.bias is None else norm.bias.double()
    channels = torch.arange(host.out_channels, device=weight.device)
    taps = weight.view(*weight.shape[:2], -1)  # of an odd number, since the size is kept
    taps[channels, channels % (host.in_channels // host.groups), taps.shape[2] // 2] = factor
    return weight, beta - norm.running_mean.double() * factor


def _sizes(layer: _ConvNd) -> Iterator[tuple[int, int, int]]:
    """Kernel, padding and dilation along each axis."""
    assert isinstance(layer.padding, tuple)
    yield from zip(layer.kernel_size, layer.padding, layer.dilation, strict=True)


@torch.no_grad()
def _add(host: _ConvNd, weight: Tensor, bias: Tensor) -> None:
    requires_grad = bool(host.weight.requires_grad)
    own = torch.zeros_like(bias) if host.bias is None else host.bias.double()
    host.weight = nn.Parameter((host.weight.double() + weight).to(host.weight.dtype), requires_grad=requires_grad)
    host.bias = nn.Parameter((own + bias).to(host.weight.dtype), requires_grad=requires_grad)


@torch.no_grad()
def _make_zero(layer: _ConvNd | _BatchNorm) -> None:
    """Make the layer return zeros, for code that still adds them."""
    if layer.weight is None:  # a norm without factors
        layer.weight, layer.bias = (nn.Parameter(torch.zeros_like(layer.running_mean)) for _ in range(2))
    layer.weight.zero_()
    if layer.bias is not None:
        layer.bias.zero_()
    layer.__class__ = _MERGED[type(layer)]


def _remove_terms(top: fx.Node, merged: set[fx.Node]) -> None:
    """Reduce the sum to the other terms; the zero with which Python's `sum` begins is left out too."""
    inner = list(_inner_additions(top))
    kept = [(term, sign) for term, sign in _parts(top) if term not in merged and (isinstance(term, fx.Node) or term)]
    # An added term must come first. There is one: the convolution that took in the others has a positive sign.
    kept.sort(key=lambda one: -one[1])
    (total, _), *rest = kept
    if rest:  # the last term is added by the sum's own node, so that its name stays
        with top.graph.inserting_before(top):
            for term, sign in rest[:-1]:
                total = top.graph.call_function(_OPERATORS[sign], (total, term))
        term, sign = rest[-1]
        top.op, top.target, top.args = "call_function", _OPERATORS[sign], (total, term)
    else:
        assert isinstance(total, fx.Node)
        top.replace_all_uses_with(total)
        top.graph.erase_node(top)
    for node in (*inner, *merged):
        top.graph.erase_node(node)


def _inner_additions(addition: fx.Node) -> Iterator[fx.Node]:
    """The sums inside of a sum, each before those inside of it."""
    for part in addition.args:
        if isinstance(part, fx.Node) and _is_addition(part) and len(part.users) == 1:
            yield part
            yield from _inner_additions(part)
