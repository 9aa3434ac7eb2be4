"""`lay_out_for_xnnpack`: operators of a program in the form in which XNNPACK takes them; they compute the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

_ATEN = torch.ops.aten


def lay_out_for_xnnpack(module: fx.GraphModule) -> None:
    """In place: pools as fixed windows, and means over an image that keep its rank."""
    for node in list(module.graph.nodes):
        rewrite = _REWRITES.get(node.target)
        found = None if rewrite is None else rewrite(module.graph, node)
        if found is not None:
            node.replace_all_uses_with(found)
            module.graph.erase_node(node)
    module.recompile()


def _fixed_pool(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """`adaptive_avg_pool2d` whose windows are all alike -> `avg_pool2d`; with one window, a mean."""
    source: Any = node.args[0]
    wanted: Any = node.args[1]
    shape = _shape(source)
    sizes = shape[-2:]
    if len(shape) != 4 or not all(isinstance(size, int) for size in (*sizes, *wanted)):
        return None
    if any(size % want for size, want in zip(sizes, wanted, strict=True)):
        return None
    window = [size // want for size, want in zip(sizes, wanted, strict=True)]
    with graph.inserting_before(node):
        if list(wanted) == [1, 1]:
            return graph.call_function(_ATEN.mean.dim, (source, [2, 3], True))
        return graph.call_function(_ATEN.avg_pool2d.default, (source, window, window))


def _kept_rank(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """`mean((2, 3))` of an image -> the same with `keepdim`, and a squeeze."""
    source: Any = node.args[0]
    given: Any = node.args[1] if len(node.args) > 1 else None
    if len(_shape(source)) != 4 or given is None or node.kwargs:
        return None
    dims = [given] if isinstance(given, int) else list(given)
    if sorted(dim % 4 for dim in dims) != [2, 3]:
        return None
    is_kept = len(node.args) > 2 and bool(node.args[2])
    with graph.inserting_before(node):
        kept = graph.call_function(_ATEN.mean.dim, (source, [2, 3], True))
        return kept if is_kept else graph.call_function(_ATEN.squeeze.dims, (kept, [2, 3]))


def _inferred_size(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """A reshape with one open size -> `view` with -1 there, because XNNPACK takes no computed size."""
    source: Any = node.args[0]
    shape, is_fixed = _shape(node), [isinstance(size, int) for size in _shape(node)]
    if is_fixed.count(False) != 1 or not _value(source).is_contiguous():
        return None
    with graph.inserting_before(node):
        sizes = [size if fixed else -1 for size, fixed in zip(shape, is_fixed, strict=True)]
        found = graph.call_function(_ATEN.view.default, (source, sizes))
    found.meta["val"] = node.meta["val"]
    return found


def _shape(node: fx.Node) -> tuple[Any, ...]:
    """The shape of a value; a quantize or dequantize op that was inserted has that of its input."""
    return tuple(getattr(_value(node), "shape", ()))


def _value(node: fx.Node) -> Any:
    while "val" not in node.meta and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node.meta.get("val")


_REWRITES: dict[Any, Callable[[fx.Graph, fx.Node], fx.Node | None]] = {
    _ATEN.adaptive_avg_pool2d.default: _fixed_pool,
    _ATEN.mean.dim: _kept_rank,
    **dict.fromkeys((_ATEN.flatten.using_ints, _ATEN.view.default, _ATEN.reshape.default), _inferred_size),
}
